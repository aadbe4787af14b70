// What is at a place, in words; operations by name.

/** Places of the critical path's steps: "operation 3 17" -> what it waited for. */
function pathPlaces(model) {
  return new Map(model.path.map(([type, device, index, waited], step) => [`${type} ${device} ${index}`, { waited, step }]));
}

class Finder {
  constructor(model) {
    this.model = model;
    this.onPath = pathPlaces(model);
  }

  /** The place of what was found in the critical path; undefined if it is not on it. */
  stepOf(item) {
    const { row, index, type } = item;
    if (row.type === "measured") return undefined;
    if (type === "operation" || type === "optimizer") return this.onPath.get(`${type} ${row.place} ${index}`);
    if (type === "reduction") return this.onPath.get(`reduction 0 ${this.model.reductions.indexOf(row.reductions[index])}`);
    const spans = type === "send" ? row.sends : row.spans;
    return this.onPath.get(`transfer 0 ${spans.index[index]}`);
  }

  /** Start and end, in ticks. */
  spanOf({ row, index, type }) {
    if (type === "optimizer") return [row.optimizer[index][0], row.optimizer[index][0] + row.optimizer[index][1]];
    if (type === "reduction") return [row.reductions[index].span[0], row.reductions[index].span[0] + row.reductions[index].span[1]];
    const spans = { operation: row.operations, send: row.sends, transfer: row.spans }[type];
    return [spans.start[index], spans.end[index]];
  }

  /** Everything known about what was found, on one line. */
  text(item) {
    const [start, end] = this.spanOf(item), { tick_s: tick } = this.model;
    const times = `${formatSeconds(start * tick)} to ${formatSeconds(end * tick)}, ${formatSeconds((end - start) * tick)} long`;
    const step = this.stepOf(item);
    const waited = step && (step.waited === "nothing" ? "on the critical path, its start" : `on the critical path, waited for: ${step.waited}`);
    const measured = item.row.type === "measured" ? `measured in step ${this.model.measured.step}` : "";
    return [this.what(item), times, measured, waited].filter(Boolean).join(" · ");
  }

  what({ row, index, type }) {
    const { devices, transfers } = this.model;
    if (type === "optimizer") return `optimizer step on ${devices[row.place].name}`;
    if (type === "reduction") {
      const { stages, bytes, devices: members, kind: collective = "all-reduce" } = row.reductions[index];
      const size = bytes === undefined ? "" : `, ${formatBytes(bytes)} over ${members.length} devices`;
      return `${collective} of ${stagesText(stages)} on ${devices[row.place].name}${size}`;
    }
    const spans = { operation: row.operations, send: row.sends, transfer: row.spans }[type];
    const kind = KINDS[spans.kind[index]], stage = spans.stage[index], microbatch = spans.microbatch[index];
    const name = `${stage}${kind}${microbatch}`;
    if (type === "operation") return `${name} · ${KIND_WORDS[kind]} of stage ${stage}, microbatch ${microbatch} · ${devices[row.place].name}`;
    const tensor = kind === "F" ? "activations" : "gradients";
    const place = spans.index ? spans.index[index] : -1;
    const ends = place < 0 ? `sent by ${devices[row.place].name}` : `${devices[transfers.source[place]].name} to ${devices[transfers.target[place]].name}`;
    const link = row.link ? ` on ${row.link.name}${row.right && `, ${row.right}`}` : "";
    return `${name} · ${tensor} of stage ${stage}, microbatch ${microbatch} · ${ends}${link}`;
  }

  /** Device and index of an operation by its name; null if there is none. */
  operation(name) {
    const parts = /^\s*(\d+)\s*([FBIW])\s*(\d+)\s*$/i.exec(name);
    if (!parts) return null;
    const stage = Number(parts[1]), kind = KINDS.indexOf(parts[2].toUpperCase()), microbatch = Number(parts[3]);
    for (let device = 0; device < this.model.devices.length; device += 1) {
      const spans = this.model.operations[device];
      for (let i = 0; i < spans.count; i += 1) {
        if (spans.stage[i] === stage && spans.kind[i] === kind && spans.microbatch[i] === microbatch) return { device, index: i };
      }
    }
    return null;
  }
}
