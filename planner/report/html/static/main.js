// Puts the page together: the model, its view, two charts and their controls.

const byId = (id) => document.getElementById(id);
const model = decodeModel(JSON.parse(byId("data").textContent));
const view = new View(model.limit);
const finder = new Finder(model);
const gantt = new TimeChart(byId("gantt"), view, model.tick_s);
const memory = new TimeChart(byId("memory-chart"), view, model.tick_s);
const lines = pathLines(model);
const shown = { path: true, links: true, alike: true, measured: true };
const idleText = byId("readout").textContent, idleMemoryText = byId("memory-readout").textContent;
const LOW = 4;
let selected = null;

gantt.overlay = (area, yOf) => {
  const rows = new Map(gantt.rows.filter((row) => row.type === "device").map((row) => [row.place, row]));
  // A row that is left out is like the one that stands for it.
  if (shown.path) drawPath(area, lines, (place) => yOf(rows.get(place) ?? rows.get(model.devices[place].row)) + 3);
  if (selected) {
    const [start, end] = finder.spanOf(selected);
    const isLane = selected.type === "send";
    const height = selected.row.type === "link" ? 11 : selected.row.box;
    drawFrame(area, start, end, yOf(selected.row) + (isLane ? selected.row.box + 5 : 3), isLane ? 7 : height);
  }
};

/** Select what was found, or nothing; `speak` tells it to who does not see it. */
function select(item, speak = false) {
  selected = item;
  const span = item && finder.spanOf(item);
  view.chosen = span && (span[0] + span[1]) / 2;
  byId("readout").textContent = item ? finder.text(item) : idleText;
  if (speak) byId("spoken").textContent = item ? finder.text(item) : "nothing selected";
  if (item && speak) {
    view.show(...span);
    gantt.scrollTo(item.row);
  }
  gantt.redraw();
}

function found({ row, moment, share, y }, chart) {
  return row && share >= 0 ? row.at(moment, chart.slack(3), y) : null;
}

// --- stepping by keys -----------------------------------------------------------------------------

const deviceRows = () => gantt.rows.filter((row) => row.operations);

/** The operation before or after the selected one, on its row. */
function stepAlong(by) {
  if (!selected || selected.type !== "operation") return stepInto(deviceRows()[0]);
  const index = selected.index + by;
  if (index >= 0 && index < selected.row.operations.count) select({ ...selected, index }, true);
}

/** The operation at the same time on the row above or below. */
function stepAcross(by) {
  const rows = deviceRows();
  if (!selected || !selected.row.operations) return stepInto(rows[0]);
  const row = rows[rows.indexOf(selected.row) + by];
  if (row) stepInto(row, finder.spanOf(selected));
}

function stepInto(row, [start, end] = [view.start, view.start]) {
  const { count } = row.operations;
  if (count === 0) return;
  const index = Math.min(firstAfter(row.operations, (start + end) / 2), count - 1);
  select({ type: "operation", row, index }, true);
}

/** The next step of the critical path, or the one before. */
function stepPath(by) {
  const now = selected && finder.stepOf(selected);
  const next = now ? now.step + by : by > 0 ? 0 : model.path.length - 1;
  const item = model.path[next] && pathItem(model.path[next]);
  if (item) select(item, true);
}

/** The row of a device; if another one stands for it, all rows are shown. */
function rowOf(place) {
  if (shown.alike && !isDrawn(model, place)) {
    shown.alike = byId("show-alike").checked = false;
    rebuild();
  }
  return gantt.rows.find((row) => row.type === "device" && row.place === place);
}

function pathItem([type, device, index]) {
  if (type === "transfer") {
    const row = rowOf(model.transfers.source[index]);
    return { type: "send", row, index: row.sends.index.indexOf(index) };
  }
  if (type !== "reduction") return { type, row: rowOf(device), index };
  const row = rowOf(model.reductions[index].devices[0]);
  return { type, row, index: row.reductions.indexOf(model.reductions[index]) };
}

function ganttKey({ key, shiftKey }) {
  const steps = { ArrowLeft: () => stepAlong(-1), ArrowRight: () => stepAlong(1), ArrowUp: () => stepAcross(-1), ArrowDown: () => stepAcross(1) };
  if (shiftKey && key in steps) steps[key]();
  else if (key.toLowerCase() === "c") stepPath(shiftKey ? -1 : 1);
  else if (key === "Escape") select(null, true);
  else return false;
  return true;
}

// --- what the controls do -------------------------------------------------------------------------

function rebuild() {
  gantt.setRows(ganttRows(model, shown));
  showMemory();
  if (selected) {
    const { row } = selected;
    const same = gantt.rows.find((other) => other.type === row.type && other.place === row.place && other.labels[0] === row.labels[0]);
    select(same ? { ...selected, row: same } : null);
  }
}

function showRange() {
  const unit = timeUnit(model.limit * model.tick_s), span = view.span * model.tick_s;
  const [start, end] = [view.start, view.end].map((moment) => formatMoment(moment * model.tick_s, span, unit));
  byId("range").textContent = `${start} to ${end}`;
}

function addSwitches() {
  for (const name of Object.keys(shown)) {
    byId(`show-${name}`).addEventListener("change", (event) => {
      shown[name] = event.target.checked;
      rebuild();
    });
  }
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => DO[button.dataset.do](view));
  }
  for (const choice of document.querySelectorAll("[name=memory-scale]")) {
    choice.addEventListener("change", showMemory);
  }
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = byId("find-operation").value, place = finder.operation(name);
    if (place) select({ type: "operation", row: rowOf(place.device), index: place.index }, true);
    else byId("readout").textContent = byId("spoken").textContent = `There is no operation ${name.trim() || "without a name"}; one is called 2F0: stage, one of F B I W, microbatch.`;
  });
}

function showMemory() {
  const whole = document.querySelector("[name=memory-scale]:checked").value === "capacity";
  memory.setRows(memoryRows(model, (device) => (whole ? Math.max(device.capacity_bytes, device.peak_bytes) : device.peak_bytes), shown));
}

// --- the legend -----------------------------------------------------------------------------------

function addLegend() {
  const kinds = [...KINDS].filter((_, kind) => model.operations.some((spans) => spans.kind.includes(kind)));
  const rows = kinds.map((kind) => [`${KIND_WORDS[kind]} (${kind})`, (area) => drawFirstFitting(area, [kind], drawBox(area, 0, 1, 0, 16, area.colours[`box-${kind}`], area.colours[`edge-${kind}`]), 8.5, area.colours["box-ink"])]);
  const has = { F: false, B: false };
  for (let i = 0; i < model.transfers.count; i += 1) has[KINDS[model.transfers.kind[i]]] = true;
  if (model.reductions.length) rows.push(["all-reduce (striped)", (area) => drawReduction(area, [0, 1], 0, 16)]);
  if (model.devices.some((device) => device.optimizer[1] > 0)) rows.push(["optimizer step", (area) => drawBox(area, 0, 1, 0, 16, area.colours["box-optimizer"], area.colours["edge-optimizer"])]);
  if (has.F) rows.push(["activations sent (upper line)", (area) => drawLegendLine(area, "link-F", 4)]);
  if (has.B) rows.push(["gradients sent (lower line)", (area) => drawLegendLine(area, "link-B", 9)]);
  rows.push(["critical path", (area) => drawLegendLine(area, "path", 7)]);
  byId("legend").replaceChildren(...rows.map(([text, draw]) => legendItem(text, draw)));
}

function drawLegendLine(area, colour, y) {
  area.context.fillStyle = area.colours[colour];
  area.context.fillRect(0, y, 26, 2.5);
}

function legendItem(text, draw) {
  const item = document.createElement("li"), canvas = document.createElement("canvas");
  const ratio = window.devicePixelRatio || 1;
  canvas.setAttribute("aria-hidden", "true");
  [canvas.width, canvas.height] = [26 * ratio, 16 * ratio];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = FONT;
  draw({ context, left: 0, width: 26, ratio, view: { start: 0, end: 1, span: 1 }, colours: readColours() });
  item.append(canvas, text);
  return item;
}

// --- print ----------------------------------------------------------------------------------------

/** Print shows everything, dark on light. */
function print(isOn) {
  document.documentElement.toggleAttribute("data-print", isOn);
  for (const chart of [gantt, memory]) chart.recolour();
  addLegend();
}

addKeys(gantt, ganttKey);
addKeys(memory);
addWheel(gantt);
addWheel(memory);
addPointers(gantt, {
  hover(place) {
    const item = found(place, gantt);
    byId("readout").textContent = item ? finder.text(item) : selected ? finder.text(selected) : idleText;
  },
  click: (place) => select(found(place, gantt)),
  leave: () => select(selected),
});
addPointers(memory, {
  hover({ row, moment, share }) {
    byId("memory-readout").textContent = row && share >= 0 && moment <= model.end ? memoryText(row, moment, model.tick_s) : idleMemoryText;
  },
  click() {},
  leave: () => (byId("memory-readout").textContent = idleMemoryText),
});
addSwitches();
new ViewTable(model, view, finder);
addLegend();
// Far below the capacities every line would lie on the ground.
if (model.devices.every((device) => LOW * device.peak_bytes < device.capacity_bytes)) document.querySelector("[value=peak]").checked = true;
rebuild();
view.onChange(showRange);
showRange();
window.addEventListener("beforeprint", () => print(true));
window.addEventListener("afterprint", () => print(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", addLegend);
