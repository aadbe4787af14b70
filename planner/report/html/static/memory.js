// Memory over time: a row for each device, filled up to what it holds.

const MEMORY_ROW = 46;

function memoryRows(model, scaleOf, shown) {
  const places = [...model.devices.keys()].filter((place) => !shown.alike || isDrawn(model, place));
  return places.map((place) => [model.devices[place], place]).map(([device, place]) => ({
    height: MEMORY_ROW,
    labels: [shown.alike ? device.row_name : device.name, `${formatBytes(device.peak_bytes)} of ${formatBytes(device.capacity_bytes)}`],
    steps: model.memory[place],
    device,
    draw(area, y) {
      // A measured iteration may be longer than the simulated one, which memory is known of.
      const width = Math.min(area.width, xOf(area, model.end) - area.left);
      if (width > 0) drawMemory(area, width, model.memory[place], device, scaleOf(device), y + 6, MEMORY_ROW - 10);
    },
  }));
}

/** The highest value within each pixel, so that no peak is lost; from left to right. */
function highestByPixel(area, width, steps) {
  const columns = Math.ceil(width);
  const highest = new Float64Array(columns);
  let at = stepAt(steps, area.view.start);
  for (let x = 0; x < columns; x += 1) {
    const end = area.view.start + ((x + 1) / area.width) * area.view.span;
    let value = steps.bytes[at];
    while (at + 1 < steps.count && steps.time[at + 1] < end) {
      at += 1;
      value = Math.max(value, steps.bytes[at]);
    }
    highest[x] = value;
  }
  return highest;
}

/** The last step at or before a moment. */
function stepAt(steps, moment) {
  let low = 0, high = steps.count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps.time[middle] <= moment) low = middle; else high = middle - 1;
  }
  return low;
}

function drawMemory(area, width, steps, device, scale, y, height) {
  const { context, colours } = area, highest = highestByPixel(area, width, steps);
  const top = (bytes) => y + height - (scale > 0 ? (bytes / scale) * height : 0);
  drawTrack(area, y, height);
  context.fillStyle = colours.memory;
  context.beginPath();
  context.moveTo(area.left, y + height);
  traceSteps(area, highest, top);
  context.lineTo(area.left + highest.length, y + height);
  context.fill();
  context.beginPath();
  traceSteps(area, highest, top);
  context.strokeStyle = colours["memory-line"];
  context.lineWidth = 1.25;
  context.stroke();
  drawLevel(area, top(device.capacity_bytes), colours.ink, [5, 4]);
  drawLevel(area, top(device.peak_bytes), colours["memory-line"], [1, 3]);
}

function traceSteps(area, highest, top) {
  highest.forEach((bytes, x) => {
    area.context.lineTo(area.left + x, top(bytes));
    area.context.lineTo(area.left + x + 1, top(bytes));
  });
}

function drawLevel(area, y, colour, dashes) {
  const { context } = area;
  context.save();
  context.setLineDash(dashes);
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(area.left, Math.round(y) + 0.5);
  context.lineTo(area.left + area.width, Math.round(y) + 0.5);
  context.stroke();
  context.restore();
}

function memoryText(row, moment, tickSeconds) {
  const bytes = row.steps.bytes[stepAt(row.steps, moment)];
  const share = ((100 * bytes) / row.device.capacity_bytes).toFixed(0);
  return `${row.device.name} at ${formatSeconds(moment * tickSeconds)}: ${formatBytes(bytes)} of ${formatBytes(row.device.capacity_bytes)} (${share} %)`;
}
