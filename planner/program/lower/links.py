"""The links at which flows can slow each other.

Of links that all the same ways cross equally often, only the narrowest ever gives a flow less than
its rate. One that a single way crosses never does, since flows of one way follow each other.
"""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.room import (
    LINE_OF_PAIR,
    LINK_CLASSES,
    LINK_USES,
    LINKS_USED,
    ROOM,
    WAY_USES,
)
from planner.program.lower.wires import LINK_GB_PER_S as WIDTH
from planner.program.lower.wires import route_end, route_link
from planner.program.program import (
    LINK_GB_PER_S,
    LINK_NUMBERS,
    PROGRAM,
    WAY_LINES,
    WAY_LINKS,
    WAY_ONCE,
    WAYS,
)
from planner.program.stage_rows import REDUCTION, REDUCTION_DEVICE, REDUCTION_LINK, ROWS


@compiled
def _use(work: Any, link: int, way: int) -> None:
    """Note that one of several unlike ways, numbered from 1, crosses a link once more.

    Links are of one class as long as the same ways have crossed them equally often.
    """
    use, state = row(work, LINK_USES, link), header(work, ROOM)
    if use.place == 0:
        items(work, LINKS_USED)[state.n_links_used] = link
        state.n_links_used += 1
        use.last_way = 0
    old = row(work, LINK_CLASSES, use.place)
    if old.last_way != way:
        new = row(work, LINK_CLASSES, state.n_link_classes)
        new.last_way, new.narrowest = 0, -1
        new.users = old.users + (use.last_way != way)
        old.last_way, old.child = way, state.n_link_classes
        state.n_link_classes += 1
    use.place, use.last_way = old.child, way


@compiled
def fill_links(rows: Any, wires: Any, program: Any, work: Any) -> None:
    """Find the links that can slow flows, and write those of each way."""
    state, numbers = header(work, ROOM), header(program, PROGRAM)
    state.n_links_used = state.way_links = state.way_once = 0
    state.n_link_classes = 1
    first = row(work, LINK_CLASSES, 0)
    first.last_way, first.users = 0, 0
    ways = _use_by_reductions(rows, work)
    _use_by_messages(rows, wires, program, work, ways)
    _number_limiting(wires, program, work)
    numbers.line_nodes = numbers.link_nodes = numbers.link_uses = 0
    for n in range(numbers.ways):
        way, use = row(program, WAYS, n), row(work, WAY_USES, n)
        way.link, way.once = state.way_links, state.way_once
        if n < state.message_ways and use.source >= 0:
            end = route_end(wires, use.source, use.target)
            for place in range(end):
                link = route_link(wires, use.source, use.target, place, end)
                if link >= 0:
                    _cross(program, work, n, link)
        elif n >= state.reduction_ways:
            found = row(rows, REDUCTION, use.reduction)
            for place in range(found.first_link, found.last_link):
                _cross(program, work, n, items(rows, REDUCTION_LINK)[place])
        way.link_end, way.once_end = state.way_links, state.way_once
        numbers.line_nodes += use.flows * (way.line_end - way.line)
        numbers.link_nodes += use.flows * (way.once_end - way.once)
        numbers.link_uses += use.flows * (way.link_end - way.link)
    _forget(work)


@compiled
def _use_by_reductions(rows: Any, work: Any) -> int:
    """Note the links of reductions; those of equal devices and links in a row are one way."""
    members, links = items(rows, REDUCTION_DEVICE), items(rows, REDUCTION_LINK)
    ways = 0
    for number in range(header(rows, ROWS).reductions):
        found = row(rows, REDUCTION, number)
        if number > 0:
            before = row(rows, REDUCTION, number - 1)
            is_alike = _are_equal(
                members, before.first_device, found.first_device, found.last_device
            )
            if is_alike and _are_equal(links, before.first_link, found.first_link, found.last_link):
                continue
        ways += 1
        for place in range(found.first_link, found.last_link):
            _use(work, links[place], ways)
    return ways


@compiled
def _are_equal(numbers: Any, before: int, first: int, last: int) -> bool:
    """Return whether numbers from first to last are those from before up to first."""
    if first - before != last - first:
        return False
    for place in range(last - first):  # noqa: SIM110 - numba compiles no generator.
        if numbers[before + place] != numbers[first + place]:
            return False
    return True


@compiled
def _use_by_messages(rows: Any, wires: Any, program: Any, work: Any, ways: int) -> None:
    """Note the links of messages; those between the same devices are one way."""
    state, lines = header(work, ROOM), items(program, WAY_LINES)
    next_line = state.pair_lines
    for n in range(state.message_ways):
        way, use = row(program, WAYS, n), row(work, WAY_USES, n)
        if way.line == way.line_end or lines[way.line] < next_line:
            continue
        next_line = lines[way.line] + 1
        ways += 1
        end = route_end(wires, use.source, use.target)
        for place in range(end):
            link = route_link(wires, use.source, use.target, place, end)
            if link >= 0:
                _use(work, link, ways)


@compiled
def _number_limiting(wires: Any, program: Any, work: Any) -> None:
    """Number the links that can slow a flow; the number of others is -1."""
    state, used, width = header(work, ROOM), items(work, LINKS_USED), items(wires, WIDTH)
    numbers = header(program, PROGRAM)
    for place in range(state.n_links_used):
        of = row(work, LINK_CLASSES, row(work, LINK_USES, used[place]).place)
        if of.narrowest < 0 or width[used[place]] < width[of.narrowest]:
            of.narrowest = used[place]
    numbers.links = 0
    for place in range(state.n_links_used):
        link, use = used[place], row(work, LINK_USES, used[place])
        of = row(work, LINK_CLASSES, use.place)
        use.number = -1
        if of.users > 1 and of.narrowest == link:
            use.number = numbers.links
            items(program, LINK_GB_PER_S)[numbers.links] = width[link]
            items(program, LINK_NUMBERS)[numbers.links] = link
            numbers.links += 1


@compiled
def _cross(program: Any, work: Any, n: int, link: int) -> None:
    """Add a link to the last way, if it can slow a flow."""
    state, use = header(work, ROOM), row(work, LINK_USES, link)
    if use.number < 0:
        return
    items(program, WAY_LINKS)[state.way_links] = use.number
    state.way_links += 1
    once, way = items(program, WAY_ONCE), row(program, WAYS, n)
    for place in range(way.once, state.way_once):
        if once[place] == use.number:
            return
    once[state.way_once] = use.number
    state.way_once += 1


@compiled
def _forget(work: Any) -> None:
    """Clear what the next program must not find."""
    state, used, line_of_pair = (
        header(work, ROOM),
        items(work, LINKS_USED),
        items(work, LINE_OF_PAIR),
    )
    for place in range(state.n_links_used):
        row(work, LINK_USES, used[place]).place = 0
    for n in range(state.message_ways):
        line_of_pair[row(work, WAY_USES, n).pair] = 0
