// Rows with more operations than pixels: each pixel is the mix of what runs within it, so that
// nothing is dropped and nothing is drawn larger than it is.

/** Shares of each kind in each pixel, kind by kind. */
function coverage(spans, first, last, start, perTick, width) {
  const shares = KINDS.split("").map(() => new Float32Array(width));
  for (let i = first; i < last; i += 1) {
    const from = Math.max(0, (spans.start[i] - start) * perTick);
    const to = Math.min(width, (spans.end[i] - start) * perTick);
    if (to > from) spread(shares[spans.kind[i]], from, to);
  }
  return shares;
}

function spread(share, from, to) {
  const first = Math.floor(from), last = Math.min(Math.ceil(to), share.length) - 1;
  if (first >= last) {
    share[last] += to - from;
    return;
  }
  share[first] += first + 1 - from;
  share.fill(1, first + 1, last);
  share[last] += to - last;
}

/** One line of pixels: the mix of the kinds' colours over the ground. */
function mixedLine(shares, colours, ground, width) {
  const image = new ImageData(width, 1);
  for (let x = 0; x < width; x += 1) {
    let free = 1, red = 0, green = 0, blue = 0;
    for (let kind = 0; kind < shares.length; kind += 1) {
      const share = Math.min(shares[kind][x], free);
      if (share === 0) continue;
      free -= share;
      red += share * colours[kind][0];
      green += share * colours[kind][1];
      blue += share * colours[kind][2];
    }
    image.data[4 * x] = red + free * ground[0];
    image.data[4 * x + 1] = green + free * ground[1];
    image.data[4 * x + 2] = blue + free * ground[2];
    image.data[4 * x + 3] = 255;
  }
  return image;
}

const line = document.createElement("canvas");

/** Draw a row of the chart as a mix; `area` has the canvas's context and its place in pixels. */
function drawDensity(area, spans, first, last, colours, ground, y, height) {
  const width = Math.max(1, Math.round(area.width * area.ratio));
  const perTick = width / (area.view.end - area.view.start);
  const shares = coverage(spans, first, last, area.view.start, perTick, width);
  line.width = width;
  line.height = 1;
  line.getContext("2d").putImageData(mixedLine(shares, colours, ground, width), 0, 0);
  area.context.imageSmoothingEnabled = false;
  area.context.drawImage(line, 0, 0, width, 1, area.left, y, area.width, height);
}
