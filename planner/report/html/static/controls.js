// Keys, pointers and the wheel; everything a pointer does a key does too.

const ZOOM_STEP = 1.6, PAN_STEP = 0.15;

const DO = {
  "zoom-in": (view) => view.zoom(ZOOM_STEP, view.focus),
  "zoom-out": (view) => view.zoom(1 / ZOOM_STEP, view.focus),
  earlier: (view) => view.pan(-PAN_STEP),
  later: (view) => view.pan(PAN_STEP),
  whole: (view) => view.whole(),
  start: (view) => view.set(0, view.span),
  end: (view) => view.set(view.limit - view.span, view.limit),
};
const KEYS = { "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", "_": "zoom-out", ArrowLeft: "earlier", ArrowRight: "later", 0: "whole", Home: "start", End: "end" };

/** Keys of a chart; `more` may take a key first. */
function addKeys(chart, more = () => false) {
  chart.host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const done = more(event);
    if (!done && (event.shiftKey && event.key.startsWith("Arrow"))) return;
    if (!done && !(event.key in KEYS)) return;
    event.preventDefault();
    if (!done) DO[KEYS[event.key]](chart.view);
  });
}

/** Ctrl and the wheel zooms, sideways or with Shift it pans; upright it scrolls as ever. */
function addWheel(chart) {
  chart.host.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const at = Math.min(1, Math.max(0, chart.locate(event.clientX, event.clientY).share));
      chart.view.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 100), at);
      return;
    }
    const across = event.shiftKey && event.deltaX === 0 ? event.deltaY : event.deltaX;
    if (Math.abs(across) <= Math.abs(event.deltaY) && !event.shiftKey) return;
    event.preventDefault();
    chart.view.pan(across / chart.area.width);
  }, { passive: false });
}

/** One pointer drags, two pinch; a press that does not move is a click. */
function addPointers(chart, { hover, click, leave }) {
  const down = new Map();
  let moved = 0;
  chart.host.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    down.set(event.pointerId, event.clientX);
    if (down.size === 1) moved = 0;
    chart.host.setPointerCapture(event.pointerId);
  });
  chart.host.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (before === undefined) {
      hover(chart.locate(event.clientX, event.clientY));
      return;
    }
    if (down.size === 1) chart.view.pan((before - event.clientX) / chart.area.width);
    else pinch(chart, down, event);
    moved += Math.abs(event.clientX - before);
    down.set(event.pointerId, event.clientX);
  });
  const up = (event) => {
    if (!down.delete(event.pointerId)) return;
    if (event.type === "pointerup" && moved < 4 && down.size === 0) click(chart.locate(event.clientX, event.clientY));
  };
  chart.host.addEventListener("pointerup", up);
  chart.host.addEventListener("pointercancel", up);
  chart.host.addEventListener("pointerleave", leave);
}

function pinch(chart, down, event) {
  const other = [...down].find(([id]) => id !== event.pointerId);
  const before = Math.abs(down.get(event.pointerId) - other[1]), now = Math.abs(event.clientX - other[1]);
  if (before < 8 || now < 8) return;
  chart.view.zoom(now / before, chart.locate((event.clientX + other[1]) / 2, event.clientY).share);
}
