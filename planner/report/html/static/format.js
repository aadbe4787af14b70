// Times and sizes as people read them, as planner.units writes them.

const SIZES = [["EiB", 2 ** 60], ["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

/** The unit in which times up to a span are easiest to read. */
function timeUnit(spanSeconds) {
  if (spanSeconds >= 10) return { symbol: "s", perSecond: 1 };
  return spanSeconds >= 1e-3 ? { symbol: "ms", perSecond: 1e3 } : { symbol: "µs", perSecond: 1e6 };
}

/** A number with four significant digits, without an exponent where it is large. */
function fourDigits(value) {
  if (Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/** A time with four significant digits in its own unit. */
function formatSeconds(seconds) {
  const unit = timeUnit(Math.abs(seconds));
  return `${fourDigits(seconds * unit.perSecond)} ${unit.symbol}`;
}

/** A moment, with as many digits as tell it from others in a view of this span. */
function formatMoment(seconds, spanSeconds, unit) {
  const digits = Math.max(0, Math.ceil(-Math.log10(spanSeconds * unit.perSecond) + 3));
  return `${(seconds * unit.perSecond).toFixed(Math.min(digits, 9))} ${unit.symbol}`;
}

/** A size with four significant digits in its own unit. */
function formatBytes(bytes) {
  for (const [symbol, size] of SIZES) {
    if (Math.abs(bytes) >= size) return `${fourDigits(bytes / size)} ${symbol}`;
  }
  return `${fourDigits(bytes)} B`;
}

/** Moments between start and end, in round steps of 1, 2 or 5, at most so many. */
function roundMoments(start, end, most) {
  const least = (end - start) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * 0.9999);
  const moments = [];
  // Counted, not summed: a sum of many steps drifts.
  for (let n = Math.ceil(start / step - 1e-9); n * step <= end * (1 + 1e-12); n += 1) moments.push(n * step);
  return { step, moments };
}

/** "stage 3" or "stages 0, 4". */
function stagesText(stages) {
  return `stage${stages.length === 1 ? "" : "s"} ${stages.join(", ")}`;
}
