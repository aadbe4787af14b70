// A chart over time: rows that scroll, a gutter with their names, an axis; drawn on one canvas
// that is as large as what is seen, so that the number of rows costs nothing.

const AXIS = 26;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";

/** Colours by name, as the style sheet has them now. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, {
    get(known, name) {
      if (!(name in known)) known[name] = style.getPropertyValue(`--${name}`).trim();
      return known[name];
    },
  });
}

/** Red, green and blue of "#RRGGBB". */
function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/** A colour with a share of white in it. */
function paler(colour, share) {
  return `rgb(${channels(colour).map((value) => Math.round(value + (255 - value) * share)).join(" ")})`;
}

class TimeChart {
  /**
   * @param {HTMLElement} host a frame around a child around a canvas
   * @param {View} view what is in view
   * @param {number} tickSeconds
   */
  constructor(host, view, tickSeconds) {
    this.host = host;
    this.child = host.firstElementChild;
    this.canvas = host.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.view = view;
    this.tickSeconds = tickSeconds;
    this.rows = [];
    this.overlay = () => {};
    this.colours = readColours();
    new ResizeObserver(() => this.draw()).observe(host);
    new IntersectionObserver(([{ isIntersecting }]) => this.see(isIntersecting)).observe(host);
    host.addEventListener("scroll", () => this.redraw());
    view.onChange(() => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
  }

  /** Rows of `{height, label, draw(area, y), at(moment, slack)}`, from the top. */
  setRows(rows) {
    let top = AXIS;
    this.rows = rows;
    for (const row of rows) {
      row.top = top;
      top += row.height;
    }
    this.height = top + 6;
    this.child.style.height = `${this.height}px`;
    this.draw();
  }

  recolour() {
    this.colours = readColours();
    this.draw();
  }

  /** A chart out of sight is drawn when it comes into sight. */
  see(isSeen) {
    this.isSeen = isSeen;
    this.redraw();
  }

  /** Draw before the next frame, once however often it is asked for. */
  redraw() {
    if (this.waiting || !this.isSeen) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  /** Where time is drawn: context, place in CSS pixels, and the view. */
  get area() {
    const width = this.host.clientWidth;
    const left = width < 520 ? 78 : 168;
    return { context: this.context, left, width: Math.max(1, width - left), ratio: this.ratio, view: this.view, colours: this.colours };
  }

  draw() {
    this.ratio = window.devicePixelRatio || 1;
    const width = this.host.clientWidth, height = Math.min(this.host.clientHeight, this.height);
    if (width === 0 || height === 0) return;
    this.fit(width, height);
    const area = this.area, { context } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = this.colours.page;
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    this.drawGrid(area, height);
    this.drawRows(area, height);
    this.overlay(area, (row) => row.top - this.host.scrollTop);
    this.drawAxis(area, width);
  }

  fit(width, height) {
    const wide = Math.round(width * this.ratio), high = Math.round(height * this.ratio);
    if (this.canvas.width === wide && this.canvas.height === high) return;
    this.canvas.width = wide;
    this.canvas.height = high;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
  }

  drawRows(area, height) {
    const { context } = this, scrolled = this.host.scrollTop;
    for (const row of this.rows) {
      const y = row.top - scrolled;
      if (y + row.height < AXIS || y > height) continue;
      context.save();
      context.beginPath();
      context.rect(area.left, y, area.width, row.height);
      context.clip();
      row.draw(area, y);
      context.restore();
      this.drawLabel(row, area, y);
    }
  }

  drawLabel(row, area, y) {
    const { context } = this;
    const room = area.left - 14 - this.drawRight(row, area, y);
    context.textAlign = "left";
    context.textBaseline = "middle";
    const lines = row.labels.filter(Boolean);
    const fits = row.height >= 26 ? lines : [lines.join("  ")];
    fits.forEach((text, i) => {
      context.fillStyle = i === 0 && !row.isQuiet ? this.colours.ink : this.colours.muted;
      context.fillText(shortened(context, text, room), 8, y + row.height / 2 + (i - (fits.length - 1) / 2) * 13);
    });
  }

  /** A figure at the right of the gutter, where it is wide; returns the room it takes. */
  drawRight(row, area, y) {
    if (!row.right || area.left < 120) return 0;
    const { context } = this;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = this.colours.muted;
    context.fillText(row.right, area.left - 8, y + row.height / 2);
    return context.measureText(row.right).width + 8;
  }

  moments(area) {
    const seconds = this.tickSeconds;
    return roundMoments(area.view.start * seconds, area.view.end * seconds, Math.max(2, area.width / 90));
  }

  drawGrid(area, height) {
    const { context } = this;
    context.fillStyle = this.colours.rule;
    for (const moment of this.moments(area).moments) {
      const x = area.left + ((moment / this.tickSeconds - area.view.start) / area.view.span) * area.width;
      context.fillRect(Math.round(x), AXIS, 1, height);
    }
  }

  drawAxis(area, width) {
    const { context } = this, unit = timeUnit(area.view.end * this.tickSeconds);
    const { step, moments } = this.moments(area);
    const digits = Math.max(0, Math.min(9, -Math.floor(Math.log10(step * unit.perSecond) + 1e-9)));
    context.fillStyle = this.colours.page;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = this.colours.rule;
    context.fillRect(0, AXIS - 1, width, 1);
    context.fillStyle = this.colours.muted;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillText(unit.symbol, 8, AXIS / 2);
    for (const moment of moments) {
      const x = area.left + ((moment / this.tickSeconds - area.view.start) / area.view.span) * area.width;
      const text = (moment * unit.perSecond).toFixed(digits);
      const half = context.measureText(text).width / 2;
      if (x + 2 * half + 4 > width) continue;
      context.fillText(text, x + 4, AXIS / 2);
      context.fillRect(Math.round(x), AXIS - 6, 1, 5);
    }
  }

  /** The row and the moment at a point of the window. */
  locate(clientX, clientY) {
    const box = this.host.getBoundingClientRect(), area = this.area;
    const y = clientY - box.top - this.host.clientTop + this.host.scrollTop;
    const share = (clientX - box.left - this.host.clientLeft - area.left) / area.width;
    const row = clientY - box.top < AXIS ? undefined : this.rows.find((found) => y >= found.top && y < found.top + found.height);
    return { row, share, moment: area.view.start + share * area.view.span, y: row ? y - row.top : 0 };
  }

  /** Ticks of so many pixels. */
  slack(pixels) {
    return (pixels / this.area.width) * this.view.span;
  }

  scrollTo(row) {
    const above = row.top - AXIS - this.host.scrollTop;
    const below = row.top + row.height - this.host.scrollTop - this.host.clientHeight;
    if (above < 0) this.host.scrollTop += above;
    else if (below > 0) this.host.scrollTop += below;
  }
}

/** A text that fits: the end of a name tells most. */
function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText(`…${text.slice(middle)}`).width <= room) high = middle; else low = middle + 1;
  }
  return `…${text.slice(low)}`;
}
