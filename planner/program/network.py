"""Flows on their way: the lines they stand in, and how they share links.

A flow stands in all lines of its way in the order of requests. Once it is the first in all of them
it sets off; after its latency its bytes have max-min fair rates on its links (Bertsekas and
Gallager, Data Networks, 6.5.2): the rates of all rise together until a link is full, then those
over other links continue to rise. While a device that it concerns computes, its rate is at most a
share of what it has alone, where the device's type says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.events import end_code, forget, push, starts_to_hold, touch
from planner.program.program import (
    DEVICES,
    EFFECTS,
    PROGRAM,
    TASKS,
    WAY_DEVICES,
    WAY_LINES,
    WAY_LINKS,
    WAY_ONCE,
    WAYS,
)
from planner.program.sharing import demand, divide, give, note_changed, note_link, reach
from planner.program.work import (
    CHANGED,
    FLOWS,
    FOUND,
    LINE_NODES,
    LINES,
    LINK_NODES,
    LINKS,
    MACHINES,
    SLOWED,
    STACK,
    STATES,
    TOO_SMALL,
    WORK,
)

# --- requests and ends ----------------------------------------------------------------------------


@compiled
def request(p: int, w: int, n: int, now: float) -> None:
    """Let a flow stand in its lines, and set off if it is the first in all of them."""
    state, task, flow = header(w, WORK), row(p, TASKS, n), row(w, FLOWS, n)
    way = row(p, WAYS, task.resource)
    flow.is_active, flow.meets, flow.slowed_by, flow.seen = 1, 0, -1, 0
    flow.share, flow.since_s, flow.most, flow.gb_per_s = 1.0, 0.0, 1.0, way.gb_per_s
    times = row(w, STATES, n)
    times.start_s = times.end_s = np.inf
    if task.slot == 1:
        _hold_sender(p, w, task.effect, 1)
    way_lines = items(p, WAY_LINES)
    at = state.n_line_nodes
    if at + way.line_end - way.line > state.line_nodes_rows:
        state.status = TOO_SMALL
        return
    flow.line_node = at
    for i in range(way.line, way.line_end):
        line, node = row(w, LINES, way_lines[i]), row(w, LINE_NODES, at)
        node.flow = n
        node.next = -1
        if line.tail >= 0:
            row(w, LINE_NODES, line.tail).next = at
        else:
            line.head = at
        line.tail = at
        at += 1
    state.n_line_nodes = at
    _start_first(p, w, n, now)


@compiled
def _hold_sender(p: int, w: int, effect: int, change: int) -> None:
    sender = row(p, EFFECTS, effect).end_device
    row(w, MACHINES, sender).held_by += change
    if change < 0:
        touch(w, sender)


@compiled
def _start_first(p: int, w: int, n: int, now: float) -> None:
    """Let a flow set off if it is the first in all its lines."""
    state, task = header(w, WORK), row(p, TASKS, n)
    times, flow = row(w, STATES, n), row(w, FLOWS, n)
    if times.start_s < np.inf:
        return
    way, way_lines = row(p, WAYS, task.resource), items(p, WAY_LINES)
    for i in range(way.line, way.line_end):
        if row(w, LINE_NODES, row(w, LINES, way_lines[i]).head).flow != n:
            return
    times.start_s = now
    end_s = now + task.seconds
    flow.due_s = times.end_s = end_s
    starts_to_hold(p, w, task.effect)
    if header(p, PROGRAM).is_slowed:
        communicate(p, w, way, 1)
    push(w, end_s, end_code(p, n))
    if header(p, PROGRAM).is_slowed and _may_be_slowed(p, way):
        items(w, SLOWED)[state.n_slowed] = n
        state.n_slowed += 1
        if now + way.latency_s > now:
            push(w, now + way.latency_s, end_code(p, n))
    if way.once < way.once_end:
        _join_links(p, w, n, way, now)


@compiled
def _join_links(p: int, w: int, n: int, way: Any, now: float) -> None:
    """Have a flow use the links of its way from now on."""
    state, once = header(w, WORK), items(p, WAY_ONCE)
    at = state.n_link_nodes
    if at + way.once_end - way.once > state.link_nodes_rows:
        state.status = TOO_SMALL
        return
    row(w, FLOWS, n).link_node = at
    is_shared = False
    for i in range(way.once, way.once_end):
        link, node = row(w, LINKS, once[i]), row(w, LINK_NODES, at)
        node.flow = n
        node.next = -1
        node.before = link.tail
        if link.tail >= 0:
            is_shared = True
            row(w, LINK_NODES, link.tail).next = at
        else:
            link.head = at
        link.tail = at
        at += 1
    state.n_link_nodes = at
    demand(p, w, way, row(w, FLOWS, n).gb_per_s)
    if is_shared:
        _meet(p, w, way, now)


@compiled
def _meet(p: int, w: int, way: Any, now: float) -> None:
    """Announce the first bytes of flows that share links; those alone on theirs need none."""
    way_links, stack, found = items(p, WAY_LINKS), items(w, STACK), items(w, FOUND)
    for i in range(way.link, way.link_end):
        stack[i - way.link] = way_links[i]
    reach(p, w, way.link_end - way.link)
    for i in range(header(w, WORK).n_found):
        n = found[i]
        flow = row(w, FLOWS, n)
        if not flow.meets:
            first_s = row(w, STATES, n).start_s + row(p, WAYS, row(p, TASKS, n).resource).latency_s
            if first_s > now:
                push(w, first_s, end_code(p, n))
            flow.meets = 1
    if now + way.latency_s <= now:
        note_changed(p, w, way)


@compiled
def ends_now(p: int, w: int, n: int, now: float) -> bool:
    """Return whether a flow ends at a moment that was announced for it; that may have changed.

    One that ends leaves its links and its lines, in which the next ones may set off.
    """
    task, flow, times = row(p, TASKS, n), row(w, FLOWS, n), row(w, STATES, n)
    if not flow.is_active:
        return False
    way = row(p, WAYS, task.resource)
    if times.end_s != now:
        if times.start_s + way.latency_s == now:
            note_changed(p, w, way)
        return False
    flow.is_active = 0
    if header(p, PROGRAM).is_slowed:
        communicate(p, w, way, -1)
        state = header(w, WORK)
        state.n_slowed = forget(items(w, SLOWED), state.n_slowed, n)
    if task.slot == 1:
        _hold_sender(p, w, task.effect, -1)
    _leave_links(p, w, flow.link_node, way)
    demand(p, w, way, -flow.gb_per_s)
    way_lines = items(p, WAY_LINES)
    for i in range(way.line, way.line_end):
        line = row(w, LINES, way_lines[i])
        line.head = row(w, LINE_NODES, line.head).next
        if line.head < 0:
            line.tail = -1
    for i in range(way.line, way.line_end):
        head = row(w, LINES, way_lines[i]).head
        if head >= 0:
            follower = row(w, LINE_NODES, head).flow
            _start_first(p, w, follower, now)
            if row(w, STATES, follower).start_s == now:
                row(w, STATES, follower).cause = n
    return True


@inlined
def _leave_links(p: int, w: int, node: int, way: Any) -> None:
    once = items(p, WAY_ONCE)
    for i in range(way.once, way.once_end):
        link, mine = row(w, LINKS, once[i]), row(w, LINK_NODES, node + i - way.once)
        before, after = mine.before, mine.next
        if before >= 0:
            row(w, LINK_NODES, before).next = after
        else:
            link.head = after
        if after >= 0:
            row(w, LINK_NODES, after).before = before
        else:
            link.tail = before
        if link.head >= 0:
            note_link(w, once[i])


# --- slowed by what devices compute ---------------------------------------------------------------


@compiled
def communicate(p: int, w: int, way: Any, change: int) -> None:
    """Note that a flow has set off (1) or has arrived (-1), for devices that it slows."""
    ends = items(p, WAY_DEVICES)
    for i in range(way.device, way.device_end):
        if row(p, DEVICES, ends[i]).compute_slowdown != 1.0:
            row(w, MACHINES, ends[i]).under_way += change
            header(w, WORK).load_changed = 1


@compiled
def _may_be_slowed(p: int, way: Any) -> bool:
    ends = items(p, WAY_DEVICES)
    for i in range(way.device, way.device_end):
        if row(p, DEVICES, ends[i]).message_slowdown != 1.0:
            return True
    return False


@compiled
def _slow(p: int, w: int, n: int, now: float) -> None:
    """Note by how much a flow is slowed from now on, once its first byte has set off."""
    flow, way = row(w, FLOWS, n), row(p, WAYS, row(p, TASKS, n).resource)
    if row(w, STATES, n).start_s + way.latency_s > now:
        return
    most, ends = 1.0, items(p, WAY_DEVICES)
    for i in range(way.device, way.device_end):
        if row(w, MACHINES, ends[i]).running >= 0:
            most = max(most, row(p, DEVICES, ends[i]).message_slowdown)
    most = 1 / most
    if most == flow.most:
        return
    flow.most = most
    demand(p, w, way, way.gb_per_s * most - flow.gb_per_s)
    flow.gb_per_s = way.gb_per_s * most
    note_changed(p, w, way)
    give(p, w, n, most, now)


@compiled
def settle(p: int, w: int, now: float) -> None:
    """Divide the links anew, once all that begins or ends at a moment has done so."""
    state, slowed = header(w, WORK), items(w, SLOWED)
    for i in range(state.n_slowed):
        _slow(p, w, slowed[i], now)
    n = state.n_changed
    if n == 0:
        return
    stack, changed = items(w, STACK), items(w, CHANGED)
    for i in range(n):
        stack[i] = changed[i]
        row(w, LINKS, changed[i]).is_changed = 0
    state.n_changed = 0
    reach(p, w, n)
    for i in range(n):
        row(w, LINKS, changed[i]).was_full = row(w, LINKS, changed[i]).is_full
    divide(p, w, now)
