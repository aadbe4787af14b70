"""Reductions of stages that are intervals of layers.

Each stage has its buckets in the order in which a backward fills them; then come the gradients of
tied parameters, by the stages that hold them.
"""

from __future__ import annotations

from typing import Any

from planner.costs.stage_table import (
    AGAIN_S,
    HELD,
    HELD_BEFORE,
    HELD_START,
    SECONDS,
    TABLE,
    is_again,
)
from planner.program.compiled import compiled, header, inlined, items, pointer_at, row
from planner.program.lower.collectives import (
    RING,
    TREE,
    add_member,
    add_members,
    edge_source,
    edge_target,
    edges_of,
    fill_collective,
    messages_of,
    share_links,
)
from planner.program.lower.gradient_tables import (
    BYTES,
    COLLECTIVE_S,
    GATHERED,
    GRADIENTS,
    MEMBERS,
    STAGE_OF,
    STAGES,
    TIE_BYTES,
    TIE_GATHERED,
    TIE_STAGES,
    TIE_START,
    TIED,
    TIED_START,
    TIED_USERS,
)
from planner.program.lower.wires import TYPE_OF, route_end, route_link
from planner.program.stage_rows import (
    AHEAD_S,
    DEVICE,
    MAKER,
    REDUCTION,
    REDUCTION_DEVICE,
    REDUCTION_LINK,
    REPLICA,
    ROWS,
    STAGE,
)


@compiled
def fill_gradients(rows: Any, gradients: Any, wires: Any) -> bool:
    """Fill in the reductions of stages of one class; return whether all their devices have paths.

    Args:
        rows: pointer to the tables of stages, with ``begin``, ``end`` and ``rerun`` of each: its
            layers, and the limit on those that it recomputes.
        gradients: pointer to the tables of :mod:`planner.program.lower.gradient_tables`.
        wires: pointer to the tables of the network.
    """
    h, is_joined = header(rows, ROWS), True
    h.reductions, h.makers = 0, 0
    note_stages(rows, gradients)
    for stage in range(h.stages):
        items(gradients, STAGES)[0] = stage
        found = row(rows, STAGE, stage)
        if found.last - found.first > 1:
            is_joined = _reduce_stage(rows, gradients, wires, stage) and is_joined
    _find_ties(rows, gradients, wires)
    for tie in range(header(gradients, GRADIENTS).ties):
        is_joined = _reduce_tie(rows, gradients, wires, tie) and is_joined
    return is_joined


# --- stages ---------------------------------------------------------------------------------------


@compiled
def note_stages(rows: Any, gradients: Any) -> None:
    """Write down the stage of each layer."""
    stage_of = items(gradients, STAGE_OF)
    for stage in range(header(rows, ROWS).stages):
        found = row(rows, STAGE, stage)
        for layer in range(found.begin, found.end):
            stage_of[layer] = stage


@compiled
def holders_of(rows: Any, gradients: Any, parameter: int, stage: int) -> int:
    """Return how many devices share the optimizer's state of a parameter that a stage holds."""
    found = row(rows, STAGE, stage)
    users, (first, last) = items(gradients, TIED_USERS), users_of(gradients, parameter)
    is_own = users[first] >= found.begin and users[last - 1] < found.end
    if is_own or reduces_in_turn(rows, gradients, parameter):
        return int(found.last - found.first)
    header(gradients, GRADIENTS).members = 0
    for place in range(first, last):
        add_members(rows, gradients, items(gradients, STAGE_OF)[users[place]])
    return int(header(gradients, GRADIENTS).members)


@compiled
def _reduce_stage(rows: Any, gradients: Any, wires: Any, stage: int) -> bool:
    """Add the buckets of a stage, the last of a forward first."""
    g, found = header(gradients, GRADIENTS), row(rows, STAGE, stage)
    table = table_of(gradients)
    start, held_parameters = items(table, HELD_START), items(table, HELD)
    g.members = 0
    add_members(rows, gradients, stage)
    first, kind = header(table, TABLE).parameters * _type_of(rows, wires, found.first), -1
    held, gathered, place, is_joined = 0, 0, -1, True
    for layer in range(found.end - 1, found.begin - 1, -1):
        for entry in range(start[layer + 1] - 1, start[layer] - 1, -1):
            bytes_ = items(gradients, BYTES)[first + held_parameters[entry]]
            if bytes_ == 0 or not _is_own(rows, gradients, entry, found.begin, found.end):
                continue
            if kind < 0:
                kind = 0
                is_joined = _find_ways(gradients, wires)
            if held > 0 and g.has_buckets and held + bytes_ > g.bucket_bytes:
                _add(rows, gradients, wires, held, gathered, 1)
                _set_ahead(rows, gradients, wires, stage, place)
                held = gathered = 0
            held += bytes_
            gathered += items(gradients, GATHERED)[first + held_parameters[entry]]
            place = layer
    if held > 0:
        _add(rows, gradients, wires, held, gathered, 1)
        if g.has_buckets:
            _set_ahead(rows, gradients, wires, stage, place)
    return is_joined


@inlined
def table_of(gradients: Any) -> Any:
    """Return the pointer to the block of the stage table."""
    return pointer_at(header(gradients, GRADIENTS).table, TABLE)


@inlined
def _type_of(rows: Any, wires: Any, replica: int) -> int:
    return int(items(wires, TYPE_OF)[row(rows, DEVICE, row(rows, REPLICA, replica).device).number])


@compiled
def _is_own(rows: Any, gradients: Any, entry: int, begin: int, end: int) -> bool:
    """Return whether a stage reduces an entry's gradient by itself, in the place of this entry."""
    table = table_of(gradients)
    if items(table, HELD_BEFORE)[entry] >= begin:
        return False
    parameter, users = items(table, HELD)[entry], items(gradients, TIED_USERS)
    first, last = users_of(gradients, parameter)
    if users[first] >= begin and users[last - 1] < end:
        return True
    return reduces_in_turn(rows, gradients, parameter)


@inlined
def users_of(gradients: Any, parameter: int) -> tuple[int, int]:
    """Return where the layers that use a parameter begin and end in TIED_USERS."""
    start = items(gradients, TIED_START)
    return start[parameter], start[parameter + 1]


@compiled
def reduces_in_turn(rows: Any, gradients: Any, parameter: int) -> bool:
    """Return whether a tied gradient is reduced among replicas, and then among stages."""
    users, stage_of = items(gradients, TIED_USERS), items(gradients, STAGE_OF)
    first, last = users_of(gradients, parameter)
    for place in range(first, last):
        one, other = row(rows, STAGE, stage_of[users[first]]), stage_of[users[place]]
        second = row(rows, STAGE, other)
        if one.last - one.first != second.last - second.first:
            return False
    is_tied = stage_of[users[first]] != stage_of[users[last - 1]]
    return bool(header(gradients, GRADIENTS).in_turn == 1 and is_tied)


@compiled
def _find_ways(gradients: Any, wires: Any) -> bool:
    """Work out the messages of a ring and a tree; without a path they take for ever."""
    g = header(gradients, GRADIENTS)
    is_joined = share_links(wires, gradients, RING, 1)
    g.ring_messages = messages_of(wires, gradients, RING)
    share_links(wires, gradients, RING, 0)
    is_joined = share_links(wires, gradients, TREE, 1) and is_joined
    g.tree_messages = messages_of(wires, gradients, TREE)
    share_links(wires, gradients, TREE, 0)
    return is_joined


@compiled
def _add(rows: Any, gradients: Any, wires: Any, bytes_: int, gathered: int, stages: int) -> None:
    """Add a reduction among the members, of so many of the stages listed, and its all-gather."""
    h, members = header(rows, ROWS), items(gradients, MEMBERS)
    found, count = row(rows, REDUCTION, h.reductions), header(gradients, GRADIENTS).members
    found.first_device = found.first_link = 0
    if h.reductions:
        before = row(rows, REDUCTION, h.reductions - 1)
        found.first_device, found.first_link = before.last_device, before.last_link
    h.reductions += 1
    algorithm = fill_collective(wires, gradients, bytes_, gathered, found)
    found.bytes, found.gathered_bytes, found.gathers = bytes_, gathered, gathered > 0
    found.last_device = found.first_device + count
    for place in range(count):
        items(rows, REDUCTION_DEVICE)[found.first_device + place] = members[place]
    found.last_link = found.first_link
    for number in range(edges_of(gradients, algorithm)):
        source = edge_source(gradients, algorithm, number)
        target = edge_target(gradients, algorithm, number)
        end = route_end(wires, source, target)
        for place in range(end):
            link = route_link(wires, source, target, place, end)
            if link >= 0:
                items(rows, REDUCTION_LINK)[found.last_link] = link
                found.last_link += 1
    found.first_maker = h.makers
    for place in range(stages):
        _add_makers(rows, gradients, items(gradients, STAGES)[place])
    found.last_maker = h.makers


@compiled
def _add_makers(rows: Any, gradients: Any, stage: int) -> None:
    """Have the replicas of a stage on the members make a reduction's gradients, at their end."""
    h, found, members = header(rows, ROWS), row(rows, STAGE, stage), items(gradients, MEMBERS)
    for replica in range(found.first, found.last):
        for place in range(header(gradients, GRADIENTS).members):
            if members[place] == row(rows, REPLICA, replica).device:
                items(rows, MAKER)[h.makers] = replica
                items(rows, AHEAD_S)[2 * h.makers] = items(rows, AHEAD_S)[2 * h.makers + 1] = 0.0
                h.makers += 1
                break


@compiled
def _set_ahead(rows: Any, gradients: Any, wires: Any, stage: int, place: int) -> None:
    """Have replicas make the last bucket when a backward has run the layer at a place."""
    found, last = row(rows, STAGE, stage), row(rows, REDUCTION, header(rows, ROWS).reductions - 1)
    table, kind, collective_s = table_of(gradients), -1, items(gradients, COLLECTIVE_S)
    layers, ahead_s = header(table, TABLE).layers, items(rows, AHEAD_S)
    whole_s = weight_s = 0.0
    for at in range(last.first_maker, last.last_maker):
        other = _type_of(rows, wires, items(rows, MAKER)[at])
        if other != kind:
            kind, whole_s, weight_s = other, 0.0, 0.0
            for layer in range(found.begin, place):
                again_s, number = 0.0, kind * layers + layer
                if is_again(table, found.begin, layer, found.rerun):
                    again_s = items(table, AGAIN_S)[number]
                gather_s, scatter_s = collective_s[2 * layer], collective_s[2 * layer + 1]
                whole_s += items(table, SECONDS)[4 * number] + again_s + (gather_s + scatter_s)
                weight_s += items(table, SECONDS)[4 * number + 3] + scatter_s
        ahead_s[2 * at], ahead_s[2 * at + 1] = whole_s, weight_s


# --- tied parameters ------------------------------------------------------------------------------


@compiled
def _find_ties(rows: Any, gradients: Any, wires: Any) -> None:
    """List the sets of several stages that hold tied parameters, in the order of tuples."""
    g, tied, start = (
        header(gradients, GRADIENTS),
        items(gradients, TIED),
        items(gradients, TIED_START),
    )
    stages, ends = items(gradients, TIE_STAGES), items(gradients, TIE_START)
    g.ties, ends[0] = 0, 0
    for number in range(g.tied_rows):
        at = ends[g.ties]
        for place in range(start[tied[number]], start[tied[number] + 1]):
            stage = items(gradients, STAGE_OF)[items(gradients, TIED_USERS)[place]]
            if at == ends[g.ties] or stages[at - 1] != stage:
                stages[at] = stage
                at += 1
        if at - ends[g.ties] < 2:
            continue
        kind = _type_of(rows, wires, row(rows, STAGE, stages[at - 1]).first)
        place = kind * header(table_of(gradients), TABLE).parameters + tied[number]
        ends[g.ties + 1] = at
        _insert_tie(gradients, items(gradients, BYTES)[place], items(gradients, GATHERED)[place])


@compiled
def _insert_tie(gradients: Any, bytes_: int, gathered: int) -> None:
    """Add the bytes to those of an equal set of stages, or keep the last one as a new set."""
    g, total = header(gradients, GRADIENTS), items(gradients, TIE_BYTES)
    all_gathered = items(gradients, TIE_GATHERED)
    for tie in range(g.ties):
        if not _is_before(gradients, tie, g.ties) and not _is_before(gradients, g.ties, tie):
            total[tie] += bytes_
            all_gathered[tie] += gathered
            return
    total[g.ties], all_gathered[g.ties] = bytes_, gathered
    g.ties += 1


@compiled
def _is_before(gradients: Any, one: int, other: int) -> bool:
    """Return whether a set of stages comes before another."""
    stages, ends = items(gradients, TIE_STAGES), items(gradients, TIE_START)
    count, size = ends[one + 1] - ends[one], ends[other + 1] - ends[other]
    for place in range(min(count, size)):
        here, there = stages[ends[one] + place], stages[ends[other] + place]
        if here != there:
            return bool(here < there)
    return bool(count < size)


@compiled
def _reduce_tie(rows: Any, gradients: Any, wires: Any, rank: int) -> bool:
    """Add the reductions of a set of stages, by its rank; return whether its devices have paths."""
    g, tie = header(gradients, GRADIENTS), 0
    for one in range(g.ties):
        before = 0
        for other in range(g.ties):
            before += _is_before(gradients, other, one)
        if before == rank:
            tie = one
    ends, stages = items(gradients, TIE_START), items(gradients, STAGES)
    count, replicas = ends[tie + 1] - ends[tie], -1
    for place in range(count):
        stages[place] = items(gradients, TIE_STAGES)[ends[tie] + place]
        found = row(rows, STAGE, stages[place])
        size = found.last - found.first
        replicas = size if place == 0 or size == replicas else -2
    bytes_ = items(gradients, TIE_BYTES)[tie]
    if bytes_ == 0:
        return True
    if not g.in_turn or replicas < 0:
        gathered = items(gradients, TIE_GATHERED)[tie]
        return _reduce_among(rows, gradients, wires, bytes_, gathered, count, -1)
    is_joined = True
    for replica in range(replicas):
        is_joined = _reduce_among(rows, gradients, wires, bytes_, 0, count, replica) and is_joined
    return is_joined


@compiled
def _reduce_among(
    rows: Any, gradients: Any, wires: Any, bytes_: int, gathered: int, stages: int, replica: int
) -> bool:
    """Reduce among all devices of the stages listed, or among one replica of each."""
    g = header(gradients, GRADIENTS)
    g.members = 0
    for place in range(stages):
        stage = items(gradients, STAGES)[place]
        if replica < 0:
            add_members(rows, gradients, stage)
        else:
            add_member(rows, gradients, row(rows, STAGE, stage).first + replica)
    if g.members < 2:
        return True
    is_joined = _find_ways(gradients, wires)
    _add(rows, gradients, wires, bytes_, gathered, stages)
    return is_joined
