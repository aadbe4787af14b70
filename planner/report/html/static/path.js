// The critical path as one line through the rows, and what is selected.

/** Each step of the path as a line: from a moment in one row to a moment in another. */
function pathLines(model) {
  let row = 0;
  return model.path.map(([type, device, index]) => {
    if (type === "operation") row = device;
    if (type === "optimizer") row = device;
    const [start, end] = stepSpan(model, type, device, index);
    const from = row;
    if (type === "transfer") {
      row = model.transfers.target[index];
      return { from: model.transfers.source[index], to: row, start, end };
    }
    return { from, to: from, start, end };
  });
}

function stepSpan(model, type, device, index) {
  if (type === "operation") return [model.operations[device].start[index], model.operations[device].end[index]];
  if (type === "transfer") return [model.transfers.start[index], model.transfers.end[index]];
  const [start, length] = type === "reduction" ? model.reductions[index].span : model.devices[device].optimizer;
  return [start, start + length];
}

/** Draws the lines that are in view; upright ones join a step to the next. */
function drawPath(area, lines, yOf) {
  const { context, view, colours } = area;
  context.save();
  context.beginPath();
  context.rect(area.left, AXIS, area.width, 1e5);
  context.clip();
  for (const [width, colour] of [[4.5, colours.page], [2, colours.path]]) {
    context.beginPath();
    let last = null;
    for (const line of lines) {
      if (line.end < view.start || line.start > view.end) {
        last = null;
        continue;
      }
      const x = xOf(area, line.start), y = yOf(line.from);
      if (last === null) context.moveTo(x, y); else context.lineTo(x, y);
      context.lineTo(xOf(area, line.end), yOf(line.to));
      last = line;
    }
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.lineJoin = "round";
    context.stroke();
  }
  context.restore();
}

/** A frame around what is selected. */
function drawFrame(area, start, end, y, height) {
  const { context, colours } = area;
  const from = Math.max(xOf(area, start), area.left - 4), to = Math.min(xOf(area, end), area.left + area.width + 4);
  if (to < area.left || from > area.left + area.width) return;
  context.save();
  context.beginPath();
  context.rect(area.left - 3, AXIS, area.width + 3, 1e5);
  context.clip();
  for (const [width, colour] of [[5, colours.page], [2.5, colours.accent]]) {
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(from - 1.5, y - 1.5, Math.max(to - from, 1) + 3, height + 3);
  }
  context.restore();
}
