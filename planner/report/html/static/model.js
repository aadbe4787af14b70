// The embedded data as typed arrays: what starts when, and how long it takes.

const KINDS = "FBIW";
const KIND_WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

/** Columns of spans, in order of start. `reach` is the latest end so far: spans may overlap. */
function decodeSpans(columns) {
  const count = columns.kind.length;
  const spans = {
    count,
    stage: columns.stage,
    microbatch: columns.microbatch,
    kind: new Uint8Array(count),
    start: new Float64Array(count),
    end: new Float64Array(count),
    reach: new Float64Array(count),
  };
  let time = 0, reach = 0;
  for (let i = 0; i < count; i += 1) {
    spans.kind[i] = KINDS.indexOf(columns.kind[i]);
    spans.start[i] = time + columns.gap[i];
    spans.end[i] = time = spans.start[i] + columns.length[i];
    spans.reach[i] = reach = Math.max(reach, time);
  }
  return spans;
}

/** Those of the spans that stand at the indices. */
function pickSpans(spans, indices) {
  const picked = { count: indices.length, index: indices };
  for (const name of ["stage", "microbatch"]) picked[name] = indices.map((i) => spans[name][i]);
  picked.kind = Uint8Array.from(indices, (i) => spans.kind[i]);
  for (const name of ["start", "end"]) picked[name] = Float64Array.from(indices, (i) => spans[name][i]);
  let reach = 0;
  picked.reach = picked.end.map((end) => (reach = Math.max(reach, end)));
  return picked;
}

/** The first span that ends after a moment. */
function firstAfter(spans, moment) {
  let low = 0, high = spans.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.reach[middle] > moment) high = middle; else low = middle + 1;
  }
  return low;
}

/** One behind the last span that starts before a moment. */
function lastBefore(spans, moment) {
  let low = 0, high = spans.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.start[middle] < moment) low = middle + 1; else high = middle;
  }
  return low;
}

/** The span at a moment, or the nearest one that starts or ends within `slack` of it; else -1. */
function spanAt(spans, moment, slack) {
  let best = -1, distance = slack;
  for (let i = firstAfter(spans, moment - slack); i < spans.count && spans.start[i] <= moment + slack; i += 1) {
    const away = Math.max(spans.start[i] - moment, moment - spans.end[i], 0);
    if (away < distance || (away === 0 && best < 0)) [best, distance] = [i, away];
    if (away === 0) return i;
  }
  return best;
}

function decodeMemory(columns) {
  const count = columns.gap.length;
  const steps = { count, time: new Float64Array(count), bytes: new Float64Array(count) };
  let time = 0, bytes = 0;
  for (let i = 0; i < count; i += 1) {
    steps.time[i] = time += columns.gap[i];
    steps.bytes[i] = bytes += columns.changes[columns.change[i]];
  }
  return steps;
}

/** Indices by what a function says of each. */
function indicesBy(count, length, keysOf) {
  const found = Array.from({ length }, () => []);
  for (let i = 0; i < count; i += 1) for (const key of keysOf(i)) found[key].push(i);
  return found;
}

function decodeModel(data) {
  const transfers = { ...decodeSpans(data.transfers), source: data.transfers.source, target: data.transfers.target };
  const { route, routes } = data.transfers;
  const devices = data.devices.length;
  const reductions = indicesBy(data.reductions.length, devices, (i) => data.reductions[i].devices);
  const byDevice = reductions.map((indices) => indices.map((i) => data.reductions[i]));
  const model = {
    ...data,
    operations: data.operations.map(decodeSpans),
    transfers,
    onLink: indicesBy(transfers.count, data.links.length, (i) => routes[route[i]]).map((rows) => pickSpans(transfers, rows)),
    sends: indicesBy(transfers.count, devices, (i) => [transfers.source[i]]).map((rows) => pickSpans(transfers, rows)),
    reductionsOn: byDevice,
    memory: data.memory.map(decodeMemory),
    limit: Math.max(data.end, data.measured ? data.measured.end : 0, 1),
  };
  if (data.measured) {
    model.measured = {
      ...data.measured,
      operations: data.measured.operations.map(decodeSpans),
      sends: data.measured.sends.map(decodeSpans),
    };
  }
  return model;
}
