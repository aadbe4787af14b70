"""Messages between stages: activations before forwards, gradients before backwards.

A message of no bytes, or to its own device, takes no time. Messages from a device to another follow
each other, where their way has links; a device of one stream sends or receives one at a time.
"""

from __future__ import annotations

from typing import Any

from planner.program.compiled import compiled, header, items, row
from planner.program.lower.operations import B, F, I
from planner.program.lower.room import (
    GRID,
    LINE_OF_PAIR,
    MESSAGE_TASK,
    OPERATION_TASK,
    ROOM,
    WAY_USES,
    add_device,
    add_line,
    edge,
    new_task,
    new_way,
)
from planner.program.lower.wires import GB_PER_S, LATENCY_S, pair_of, route_end, route_link
from planner.program.program import (
    BY_PRIORITY,
    DEVICES,
    EFFECTS,
    FLOW,
    IN_ORDER,
    JOIN,
    PROGRAM,
    TASKS,
)
from planner.program.schedule import OWNER
from planner.program.stage_rows import (
    DEVICE,
    LENGTH_OF,
    RECEIVED_BYTES,
    RECEIVED_S,
    REPLICA,
    ROWS,
    STAGE,
)


@compiled
def fill_messages(rows: Any, schedule: Any, wires: Any, program: Any, work: Any) -> bool:
    """Fill in all messages and their ways; return False if some devices have no path."""
    stages = header(rows, ROWS).stages
    for stage in range(stages):
        for kind in range(2):
            source = stage - 1 if kind == F else stage + 1
            is_cut = 0 <= source < stages
            if is_cut and not _fill_cut(rows, schedule, wires, program, work, source, stage, kind):
                return False
    numbers, state = header(program, PROGRAM), header(work, ROOM)
    state.message_ways = numbers.ways
    numbers.effects = 4 * header(rows, ROWS).replicas + numbers.ways
    return True


@compiled
def _fill_cut(
    rows: Any,
    schedule: Any,
    wires: Any,
    program: Any,
    work: Any,
    source: int,
    stage: int,
    kind: int,
) -> bool:
    """Fill in the messages from a stage to its neighbour."""
    h, owner, grid = header(rows, ROWS), items(schedule, OWNER), items(work, GRID)
    message_task, length_of = items(work, MESSAGE_TASK), items(rows, LENGTH_OF)
    here, there, count = row(rows, STAGE, source), row(rows, STAGE, stage), h.microbatches
    width = there.last - there.first
    area = (here.last - here.first) * width
    for place in range(area * h.classes):
        grid[place] = -1
    for m in range(count):
        n = message_task[(stage * 2 + kind) * count + m]
        if n < 0:
            continue
        first, second = owner[source * count + m], owner[stage * count + m]
        place = length_of[m] * area + (first - here.first) * width + second - there.first
        if grid[place] < 0:
            grid[place] = _add_way(rows, wires, program, work, first, second, kind, length_of[m])
            if grid[place] < 0:
                return False
        _fill_message(rows, program, work, n, grid[place])
        task = row(program, TASKS, n)
        task.stage, task.kind, task.microbatch, task.replica = stage, kind, m, second
        _add_maker(rows, program, work, n, source, kind, m)
    return True


@compiled
def _fill_message(rows: Any, program: Any, work: Any, n: int, way: int) -> None:
    use, h = row(work, WAY_USES, way), header(rows, ROWS)
    use.flows += 1
    new_task(program, n, FLOW if use.seconds >= 0 else JOIN, way if use.seconds >= 0 else -1)
    task = row(program, TASKS, n)
    task.effect = 4 * h.replicas + way
    if use.seconds >= 0:
        task.seconds = use.seconds
        # Nobody knows what a device that chooses does next: so its message holds it.
        task.slot = h.send_blocks and header(program, PROGRAM).mode == BY_PRIORITY


@compiled
def _add_maker(rows: Any, program: Any, work: Any, n: int, source: int, kind: int, m: int) -> None:
    """Have a message wait for its maker, unless its sender posts it in an exchange."""
    operation_task, h = items(work, OPERATION_TASK), header(rows, ROWS)
    maker = operation_task[(source * 4 + kind) * h.microbatches + m]
    if kind == B and maker < 0:
        maker = operation_task[(source * 4 + I) * h.microbatches + m]
    is_exchanged = h.send_blocks and header(program, PROGRAM).mode == IN_ORDER
    if maker < 0:
        edge(work, n, n)
    elif not is_exchanged or row(program, TASKS, n).role == JOIN:
        edge(work, maker, n)


@compiled
def _add_way(
    rows: Any, wires: Any, program: Any, work: Any, first: int, second: int, kind: int, length: int
) -> int:
    """Return a new way between replicas, -1 without a path; its effect has the same number."""
    h, source, target = header(rows, ROWS), row(rows, REPLICA, first), row(rows, REPLICA, second)
    u, v = row(rows, DEVICE, source.device).number, row(rows, DEVICE, target.device).number
    pair = pair_of(wires, u, v)
    gb_per_s = items(wires, GB_PER_S)[pair]
    if gb_per_s <= 0:
        return -1
    bytes_ = items(rows, RECEIVED_BYTES)[(length * h.stages + target.stage) * 2 + kind]
    more_s = items(rows, RECEIVED_S)[(length * h.replicas + second) * 2 + kind]
    latency_s = items(wires, LATENCY_S)[pair]
    way = new_way(program, work, latency_s + more_s, gb_per_s)
    _fill_effect(rows, program, way, first, second, kind)
    if u == v or bytes_ == 0:
        return way
    use = row(work, WAY_USES, way)
    use.seconds = latency_s + bytes_ / (gb_per_s * 1e9) + more_s
    use.source, use.target = u, v
    if _has_links(wires, u, v):
        _stand_in_line(rows, program, work, way, source.device, target.device)
    if h.one_stream:
        stream = header(work, ROOM).stream_lines
        add_line(program, work, way, stream + source.device)
        add_line(program, work, way, stream + target.device)
    if header(program, PROGRAM).is_slowed:
        for device in (source.device, target.device):
            if row(program, DEVICES, device).is_slowed:
                add_device(program, work, way, device)
    return way


@compiled
def _has_links(wires: Any, u: int, v: int) -> bool:
    end = route_end(wires, u, v)
    for place in range(end):  # noqa: SIM110 - numba compiles no generator.
        if route_link(wires, u, v, place, end) >= 0:
            return True
    return False


@compiled
def _stand_in_line(rows: Any, program: Any, work: Any, way: int, source: int, target: int) -> None:
    """Have messages from a device to another follow each other."""
    line_of_pair, numbers = items(work, LINE_OF_PAIR), header(program, PROGRAM)
    pair = source * header(rows, ROWS).devices + target
    if line_of_pair[pair] == 0:
        numbers.lines += 1
        line_of_pair[pair] = numbers.lines
    row(work, WAY_USES, way).pair = pair
    add_line(program, work, way, line_of_pair[pair] - 1)


@compiled
def _fill_effect(rows: Any, program: Any, way: int, first: int, second: int, kind: int) -> None:
    """A received tensor counts from the start of its transfer, a sent one until its end."""
    source, target = row(rows, REPLICA, first), row(rows, REPLICA, second)
    here, there = row(rows, STAGE, source.stage), row(rows, STAGE, target.stage)
    effect = row(program, EFFECTS, 4 * header(rows, ROWS).replicas + way)
    effect.start_device, effect.end_device = target.device, source.device
    if kind == F:
        effect.start_bytes, effect.end_bytes = there.input_bytes, -here.output_bytes
    else:
        effect.start_bytes = there.output_gradient_bytes
        effect.end_bytes = -here.input_gradient_bytes
