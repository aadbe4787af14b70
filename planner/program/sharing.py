"""How flows share links: max-min fair rates.

The rates of all rise together until a link is full, then those over other links continue to rise
(Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.program.compiled import compiled, header, inlined, items, row
from planner.program.events import end_code, moment, push
from planner.program.program import LINK_GB_PER_S, TASKS, WAY_LINKS, WAY_ONCE, WAYS
from planner.program.work import (
    CHANGED,
    FLOWS,
    FOUND,
    FULL_LINKS,
    LINK_NODES,
    LINKS,
    RATES,
    RISING,
    STACK,
    STATES,
    WORK,
)

ROUNDING = 1e-9
"""Share of a rate or a bandwidth by which rounding may be off."""


@compiled
def note_changed(p: int, w: int, way: Any) -> None:
    """Have the links of a way divided anew when the moment has passed."""
    once = items(p, WAY_ONCE)
    for i in range(way.once, way.once_end):
        note_link(w, once[i])


@inlined
def note_link(w: int, number: int) -> None:
    """Have a link divided anew when the moment has passed."""
    link = row(w, LINKS, number)
    if not link.is_changed:
        state = header(w, WORK)
        link.is_changed = 1
        items(w, CHANGED)[state.n_changed] = number
        state.n_changed += 1


@inlined
def demand(p: int, w: int, way: Any, gb_per_s: float) -> None:
    """Add what a flow would take of the links of its way if it had all its rate."""
    way_links = items(p, WAY_LINKS)
    for i in range(way.link, way.link_end):
        link = row(w, LINKS, way_links[i])
        # Of a link without flows, without what rounding leaves.
        link.demand = link.demand + gb_per_s if link.head >= 0 else 0.0


@compiled
def note_full(p: int, w: int, number: int) -> bool:
    """Note, and return, whether the flows of a link would take more than its bandwidth."""
    link = row(w, LINKS, number)
    link.is_full = link.demand > items(p, LINK_GB_PER_S)[number] * (1 + ROUNDING)
    return bool(link.is_full)


@compiled
def reach(p: int, w: int, top: int) -> None:
    """Find flows over the links on the stack, flows that share a link with them, and so on.

    A link that has enough for all its flows changes the rate of none, and is left out.
    """
    state = header(w, WORK)
    stamp = state.stamp + 1
    state.stamp = stamp
    stack, found, way_links = items(w, STACK), items(w, FOUND), items(p, WAY_LINKS)
    full = items(w, FULL_LINKS)
    n = n_full = 0
    while top > 0:
        top -= 1
        number = stack[top]
        link = row(w, LINKS, number)
        if link.seen == stamp:
            continue
        link.seen = stamp
        if note_full(p, w, number):
            full[n_full] = number
            n_full += 1
        elif not link.was_full:
            continue
        at = link.head
        while at >= 0:
            node = row(w, LINK_NODES, at)
            flow = row(w, FLOWS, node.flow)
            if flow.seen != stamp:
                flow.seen = stamp
                found[n] = node.flow
                n += 1
                way = row(p, WAYS, row(p, TASKS, node.flow).resource)
                for i in range(way.link, way.link_end):
                    if row(w, LINKS, way_links[i]).seen != stamp:
                        stack[top] = way_links[i]
                        top += 1
            at = node.next
    state.n_found, state.n_full = n, n_full


@compiled
def divide(p: int, w: int, now: float) -> None:
    """Give the flows found, those whose first byte has set off, their max-min fair rates."""
    found, rates = items(w, FOUND), items(w, RATES)
    n = _take_under_way(p, w, now)
    left = n
    while left > 0:
        level = _next_level(p, w, left)
        left = _fix_rates(p, w, left, level)
    for i in range(n):
        number = found[i]
        flow = row(w, FLOWS, number)
        share = rates[i] / flow.gb_per_s
        if share >= 1 - ROUNDING:
            share = 1.0
        elif header(w, WORK).tells_links:
            flow.slowed_by = _fullest_link(p, w, number)
        give(p, w, number, share * flow.most, now)


@compiled
def _take_under_way(p: int, w: int, now: float) -> int:
    """Keep of the flows found those whose first byte has set off; return how many these are."""
    found, rising, way_links = items(w, FOUND), items(w, RISING), items(p, WAY_LINKS)
    full = items(w, FULL_LINKS)
    for i in range(header(w, WORK).n_full):
        link = row(w, LINKS, full[i])
        link.used, link.users = 0.0, 0
    n = 0
    for i in range(header(w, WORK).n_found):
        number = found[i]
        way = row(p, WAYS, row(p, TASKS, number).resource)
        if row(w, STATES, number).start_s + way.latency_s <= now:
            found[n] = number
            rising[n] = n
            n += 1
            for j in range(way.link, way.link_end):
                row(w, LINKS, way_links[j]).users += 1
    return n


@inlined
def _next_level(p: int, w: int, left: int) -> float:
    """Return the rate that all rising flows have when the next link or flow has all it can."""
    found, rising, full = items(w, FOUND), items(w, RISING), items(w, FULL_LINKS)
    links_gb_per_s = items(p, LINK_GB_PER_S)
    level = np.inf
    for i in range(left):
        level = min(level, row(w, FLOWS, found[rising[i]]).gb_per_s)
    for i in range(header(w, WORK).n_full):
        link = row(w, LINKS, full[i])
        if link.users > 0:
            link.room = (links_gb_per_s[full[i]] - link.used) / link.users
            level = min(level, link.room)
    return level


@inlined
def _fix_rates(p: int, w: int, left: int, level: float) -> int:
    """Fix the rates of flows that rise no more; return how many still rise."""
    found, rising, rates = items(w, FOUND), items(w, RISING), items(w, RATES)
    way_links = items(p, WAY_LINKS)
    most = level * (1 + ROUNDING)
    still = 0
    for i in range(left):
        at = rising[i]
        gb_per_s = row(w, FLOWS, found[at]).gb_per_s
        way = row(p, WAYS, row(p, TASKS, found[at]).resource)
        stays = gb_per_s > most
        if stays:
            for j in range(way.link, way.link_end):
                link = row(w, LINKS, way_links[j])
                if link.is_full and link.room <= most:
                    stays = False
                    break
        if stays:
            rising[still] = at
            still += 1
            continue
        rate = min(gb_per_s, level)
        rates[at] = rate
        for j in range(way.link, way.link_end):
            link = row(w, LINKS, way_links[j])
            link.used += rate
            link.users -= 1
    return still


@compiled
def _fullest_link(p: int, w: int, n: int) -> int:
    """Return the link of a flow with the least share left; of equal ones the first."""
    way_links, links_gb_per_s = items(p, WAY_LINKS), items(p, LINK_GB_PER_S)
    way = row(p, WAYS, row(p, TASKS, n).resource)
    most, fullest = -np.inf, -1
    for j in range(way.link, way.link_end):
        link = row(w, LINKS, way_links[j])
        share = link.used / links_gb_per_s[way_links[j]]
        if link.is_full and share > most:
            most, fullest = share, way_links[j]
    return fullest


@inlined
def give(p: int, w: int, n: int, share: float, now: float) -> None:
    """Let a flow go on with a share of its rate."""
    flow, times, task = row(w, FLOWS, n), row(w, STATES, n), row(p, TASKS, n)
    if share == flow.share:
        return
    flow.due_s += (now - flow.since_s) * (1 - flow.share)
    flow.since_s = now
    flow.share = share
    times.end_s = moment(times.start_s, task.seconds, flow.due_s, now, share, 0.0, now)
    push(w, times.end_s, end_code(p, n))
