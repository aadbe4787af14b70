// Operations in view as a table, a page at a time: the chart's text alternative.

const PAGE = 50;

class ViewTable {
  constructor(model, view, finder) {
    this.model = model;
    this.view = view;
    this.finder = finder;
    this.page = 0;
    this.details = document.getElementById("view-table");
    this.choice = document.getElementById("table-device");
    model.devices.forEach((device, place) => this.choice.add(new Option(device.name, String(place))));
    this.choice.addEventListener("change", () => this.turnTo(0));
    this.details.addEventListener("toggle", () => this.fill());
    document.getElementById("table-before").addEventListener("click", () => this.turnTo(this.page - 1));
    document.getElementById("table-after").addEventListener("click", () => this.turnTo(this.page + 1));
    view.onChange(() => this.turnTo(0));
  }

  turnTo(page) {
    this.page = page;
    this.fill();
  }

  fill() {
    if (!this.details.open) return;
    const device = Number(this.choice.value), spans = this.model.operations[device];
    const first = firstAfter(spans, this.view.start), last = lastBefore(spans, this.view.end);
    const from = first + this.page * PAGE, to = Math.min(last, from + PAGE);
    const rows = [];
    for (let i = from; i < to; i += 1) rows.push(this.row(spans, device, i));
    document.getElementById("table-rows").replaceChildren(...rows);
    document.getElementById("table-before").disabled = this.page === 0;
    document.getElementById("table-after").disabled = to >= last;
    document.getElementById("table-range").textContent = last > first ? `${from - first + 1} to ${to - first} of ${last - first}` : "nothing in view";
  }

  row(spans, device, i) {
    const kind = KINDS[spans.kind[i]], tick = this.model.tick_s;
    const onPath = this.finder.onPath.has(`operation ${device} ${i}`);
    const cells = [
      KIND_WORDS[kind],
      formatSeconds(spans.start[i] * tick),
      formatSeconds((spans.end[i] - spans.start[i]) * tick),
      onPath ? "yes" : "",
    ];
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = `${spans.stage[i]}${kind}${spans.microbatch[i]}`;
    row.append(head, ...cells.map((text, place) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (place === 1 || place === 2) cell.className = "number";
      return cell;
    }));
    return row;
  }
}
