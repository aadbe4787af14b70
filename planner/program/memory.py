"""What devices hold: changed by tasks as they start and end; a peak is what lasts for a moment."""

from __future__ import annotations

from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.program import EFFECTS
from planner.program.work import DIRTY, MACHINES, WORK


@inlined
def _change(w: int, d: int, bytes_: int) -> None:
    machine = row(w, MACHINES, d)
    machine.held_bytes += bytes_
    if not machine.is_dirty:
        state = header(w, WORK)
        machine.is_dirty = 1
        items(w, DIRTY)[state.n_dirty] = d
        state.n_dirty += 1


@inlined
def starts_to_hold(p: int, w: int, effect: int) -> None:
    """Change what a device holds as a task with this effect starts."""
    if effect >= 0:
        change = row(p, EFFECTS, effect)
        if change.start_bytes != 0:
            _change(w, change.start_device, change.start_bytes)


@inlined
def ceases_to_hold(p: int, w: int, effect: int) -> None:
    """Change what a device holds as a task with this effect ends."""
    if effect >= 0:
        change = row(p, EFFECTS, effect)
        if change.end_bytes != 0:
            _change(w, change.end_device, change.end_bytes)


@compiled
def note_peaks(w: int) -> None:
    """Note what devices hold at the end of a moment."""
    state, dirty = header(w, WORK), items(w, DIRTY)
    for i in range(state.n_dirty):
        machine = row(w, MACHINES, dirty[i])
        machine.is_dirty = 0
        if machine.held_bytes > machine.peak_bytes:
            machine.peak_bytes = machine.held_bytes
    state.n_dirty = 0
