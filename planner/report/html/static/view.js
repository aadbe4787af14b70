// The part of the iteration that all charts show, in ticks.

class View {
  constructor(limit) {
    this.limit = limit;
    // Closer there is nothing to see: a tick is far below the shortest operation.
    this.least = Math.min(limit, 20);
    this.start = 0;
    this.end = limit;
    this.listeners = [];
    this.chosen = null;
  }

  /** Where to zoom to, as a share of the width: to what is chosen if that is in view. */
  get focus() {
    const share = this.chosen === null ? 0.5 : (this.chosen - this.start) / this.span;
    return share >= 0 && share <= 1 ? share : 0.5;
  }

  get span() {
    return this.end - this.start;
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  set(start, end) {
    const span = Math.min(this.limit, Math.max(this.least, end - start));
    this.start = Math.min(Math.max(0, start), this.limit - span);
    this.end = this.start + span;
    for (const listener of this.listeners) listener();
  }

  whole() {
    this.set(0, this.limit);
  }

  /** Pan by a share of what is in view. */
  pan(share) {
    this.set(this.start + share * this.span, this.end + share * this.span);
  }

  /** Show a factor more or less, with what is at a share of the width staying there. */
  zoom(factor, at = 0.5) {
    const span = Math.min(this.limit, Math.max(this.least, this.span / factor));
    const fixed = this.start + at * this.span;
    this.set(fixed - at * span, fixed + (1 - at) * span);
  }

  /** Bring a span into view, as closely as before unless it is too small to see. */
  show(start, end) {
    const least = (end - start) * 3, most = Math.max((end - start) * 60, this.least);
    const span = Math.min(Math.max(this.span, least), most);
    const outside = start < this.start || end > this.end;
    if (!outside && span === this.span) return;
    const middle = (start + end) / 2;
    this.set(middle - span / 2, middle + span / 2);
  }
}
