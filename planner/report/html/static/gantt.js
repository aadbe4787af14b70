// The rows of the Gantt chart: devices, their measured times beneath, links.

const DEVICE_ROW = 32, MEASURED_ROW = 26, LINK_ROW = 17, HEADING_ROW = 26;
// Where more operations than this share of the pixels are in view, boxes would cover each other.
const DENSE = 0.4;
const PALEST = 0.65;

/** Rows for what is to be shown. */
function ganttRows(model, shown) {
  const rows = [];
  model.devices.forEach((device, place) => {
    if (shown.alike && !isDrawn(model, place)) return;
    rows.push(deviceRow(model, device, place, shown.alike ? device.row_name : device.name));
    if (shown.measured && model.measured) rows.push(measuredRow(model, device, place));
  });
  if (shown.links && model.links.length > 0) {
    rows.push({ type: "heading", height: HEADING_ROW, labels: ["Links"], isQuiet: true, draw() {}, at: () => null });
    model.links.forEach((link, place) => {
      if (!shown.alike || model.onLink[place].index.some((i) => isDrawn(model, model.transfers.source[i]) || isDrawn(model, model.transfers.target[i]))) rows.push(linkRow(model, link, place));
    });
  }
  return rows;
}

/** Whether a device stands in a row of its own for those that are alike. */
function isDrawn(model, place) {
  return model.devices[place].row === place;
}

function deviceRow(model, device, place, name) {
  const parts = { operations: model.operations[place], sends: model.sends[place], reductions: model.reductionsOn[place], optimizer: [device.optimizer] };
  return computingRow(model, device, place, parts, { type: "device", height: DEVICE_ROW, box: 19, labels: [name, device.stages.length ? stagesText(device.stages) : ""] });
}

function measuredRow(model, device, place) {
  const { operations, sends, reductions, optimizer } = model.measured;
  const parts = { operations: operations[place], sends: sends[place], reductions: reductions[place], optimizer: optimizer[place] };
  return computingRow(model, device, place, parts, { type: "measured", height: MEASURED_ROW, box: 14, labels: ["measured"], isQuiet: true });
}

/** A row of boxes, with thin lanes below: all-reduces, activations sent, gradients sent. */
function computingRow(model, device, place, parts, row) {
  return {
    ...row,
    place,
    ...parts,
    draw(area, y) {
      drawTrack(area, y + 3, row.box);
      for (const reduction of parts.reductions) drawReduction(area, reduction.span, y + 3, row.box + 3);
      drawOperations(area, parts.operations, device, y + 3, row.box);
      for (const [start, length] of parts.optimizer) {
        drawBox(area, start, start + length, y + 3, row.box, area.colours["box-optimizer"], area.colours["edge-optimizer"]);
      }
      drawSends(area, parts.sends, y + row.box + 6);
    },
    at(moment, slack, within) {
      const inLane = within > row.box + 4;
      const sent = inLane ? spanAt(parts.sends, moment, slack) : -1;
      if (sent >= 0) return { type: "send", row: this, index: sent };
      const index = spanAt(parts.operations, moment, slack);
      if (index >= 0) return { type: "operation", row: this, index };
      const step = parts.optimizer.findIndex(([start, length]) => moment >= start - slack && moment <= start + length + slack && length > 0);
      if (step >= 0) return { type: "optimizer", row: this, index: step };
      const reduction = parts.reductions.findIndex(({ span }) => moment >= span[0] && moment <= span[0] + span[1]);
      return reduction >= 0 ? { type: "reduction", row: this, index: reduction } : null;
    },
  };
}

function linkRow(model, link, place) {
  const spans = model.onLink[place];
  const width = link.gb_per_s === null ? "" : `${link.gb_per_s} GB/s`;
  return {
    type: "link",
    height: LINK_ROW,
    labels: [link.name],
    link,
    right: width,
    isQuiet: true,
    spans,
    draw(area, y) {
      drawTrack(area, y + 3, 11);
      const look = { fill: (i) => area.colours[`link-${KINDS[spans.kind[i]]}`], edge: () => null, ink: area.colours["link-ink"] };
      drawSpans(area, spans, y + 3, 11, { ...look, texts: (i) => [`${spans.stage[i]}${KINDS[spans.kind[i]]}${spans.microbatch[i]}`] });
    },
    at(moment, slack) {
      const index = spanAt(spans, moment, slack);
      return index < 0 ? null : { type: "transfer", row: this, index };
    },
  };
}

/** The pixel of a moment. */
function xOf(area, moment) {
  return area.left + ((moment - area.view.start) / area.view.span) * area.width;
}

/** A pale track: what stays visible of it is idle time. */
function drawTrack(area, y, height) {
  area.context.fillStyle = area.colours.track;
  area.context.fillRect(area.left, y, area.width, height);
}

function drawOperations(area, spans, device, y, height) {
  const first = firstAfter(spans, area.view.start), last = lastBefore(spans, area.view.end);
  const { colours } = area;
  if (last - first > area.width * DENSE) {
    const mixed = KINDS.split("").map((kind) => channels(colours[`box-${kind}`]));
    drawDensity(area, spans, first, last, mixed, channels(colours.track), y, height);
    return;
  }
  const fill = boxFill(colours, device);
  const stageOf = (i) => (device.stages.length > 1 ? spans.stage[i] : "");
  drawSpans(area, spans, y, height, {
    fill: (i) => fill(KINDS[spans.kind[i]], spans.stage[i]),
    edge: (i) => colours[`edge-${KINDS[spans.kind[i]]}`],
    ink: colours["box-ink"],
    texts: (i) => [`${stageOf(i)}${KINDS[spans.kind[i]]}${spans.microbatch[i]}`, String(spans.microbatch[i])],
  });
}

/** Later stages of a device are paler. */
function boxFill(colours, device) {
  const known = {};
  return (kind, stage) => {
    const place = Math.max(0, device.stages.indexOf(stage));
    const key = `${kind}${place}`;
    known[key] ??= place === 0 ? colours[`box-${kind}`] : paler(colours[`box-${kind}`], (PALEST * place) / device.stages.length);
    return known[key];
  };
}

/** Spans in view as boxes, with the longest of their texts that fits; `look` has it by index. */
function drawSpans(area, spans, y, height, look) {
  const last = lastBefore(spans, area.view.end);
  for (let i = firstAfter(spans, area.view.start); i < last; i += 1) {
    const wide = drawBox(area, spans.start[i], spans.end[i], y, height, look.fill(i), look.edge(i));
    if (wide.width > 9) drawFirstFitting(area, look.texts(i), wide, y + height / 2 + 0.5, look.ink);
  }
}

/** A box of at least half a pixel, which would vanish otherwise; returns where it came to lie. */
function drawBox(area, start, end, y, height, fill, edge) {
  const { context } = area;
  const from = Math.max(xOf(area, start), area.left - 2), to = Math.min(xOf(area, end), area.left + area.width + 2);
  const width = Math.max(to - from, end > start ? 0.5 : 0);
  context.fillStyle = fill;
  context.fillRect(from, y, width, height);
  if (edge && width > 4) {
    context.strokeStyle = edge;
    context.lineWidth = 1;
    context.strokeRect(from + 0.5, y + 0.5, width - 1, height - 1);
  }
  return { from, width };
}

function drawFirstFitting(area, texts, { from, width }, y, ink) {
  const { context } = area;
  const text = texts.find((found) => context.measureText(found).width <= width - 4);
  if (text === undefined) return;
  context.fillStyle = ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, from + width / 2, y);
}

/** An all-reduce is striped: it lies behind what the device computes meanwhile. */
function drawReduction(area, [start, length], y, height) {
  const { context, colours } = area;
  const from = Math.max(xOf(area, start), area.left), to = Math.min(xOf(area, start + length), area.left + area.width);
  if (to <= from) return;
  context.save();
  context.beginPath();
  context.rect(from, y, to - from, height);
  context.fillStyle = colours["box-all-reduce"];
  context.fill();
  context.clip();
  context.strokeStyle = colours["edge-all-reduce"];
  context.lineWidth = 1;
  context.beginPath();
  // Stripes keep their place on the screen, so that long ones cost no more than the width.
  for (let x = Math.floor((from - height) / 6) * 6; x < to; x += 6) {
    context.moveTo(x, y + height);
    context.lineTo(x + height, y);
  }
  context.stroke();
  context.restore();
}

/** What a device sends: activations in the upper lane, gradients in the lower. */
function drawSends(area, spans, y) {
  const last = lastBefore(spans, area.view.end), first = firstAfter(spans, area.view.start);
  const drawn = [-1, -1];
  for (let i = first; i < last; i += 1) {
    const lane = KINDS[spans.kind[i]] === "F" ? 0 : 1;
    const to = xOf(area, spans.end[i]);
    // Many within a pixel are one.
    if (to - drawn[lane] < 0.5) continue;
    drawn[lane] = to;
    area.context.fillStyle = area.colours[lane === 0 ? "link-F" : "link-B"];
    const from = xOf(area, spans.start[i]);
    area.context.fillRect(from, y + 3.5 * lane, Math.max(to - from, 1.5), 2.5);
  }
}
