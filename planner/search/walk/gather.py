"""From a block of stages and the StageTable to the rows that a program is made from, compiled.

The figures are those of :func:`planner.program.stage_rows.stage_rows` for the same stages.
"""

from __future__ import annotations

from typing import Any

from planner.costs.stage_table import (
    CROSSING,
    CROSSING_GRADIENT,
    GATHERED,
    HELD,
    HELD_BEFORE,
    HELD_START,
    RETURNED,
    RETURNED_GATHERED,
    SENT,
    STATIC,
    SUMMED,
    TABLE,
    TRAFFIC,
    stage_figures,
)
from planner.program.compiled import compiled, header, items, pointer_at, row
from planner.program.lower.gradient_tables import GRADIENTS, TIED
from planner.program.lower.gradients import holders_of, note_stages
from planner.program.lower.weights import seconds_with_collectives
from planner.program.stage_rows import (
    DEVICE,
    RECEIVED_BYTES,
    RECEIVED_S,
    REPLICA,
    ROWS,
    SECONDS,
    STAGE,
)
from planner.search.walk.block import (
    AUTOMATIC,
    begin_of,
    device_of,
    end_of,
    has_device,
    offload_of,
    replica_of,
    replicas_in,
    rerun_of,
    set_limits,
)
from planner.search.walk.memory import (
    CAPACITY_BYTES,
    DEVICE_OF,
    EACH_S,
    FIRST,
    GATHER_GB_PER_S,
    GATHER_LATENCY_S,
    GROUP_DEVICES,
    HOST_LINK_GB_PER_S,
    HOST_S,
    NEEDS,
    OPTIMIZER_GB_PER_S,
    PLACE,
    RULES,
    STAGE_FIGURES,
    SUM_GB_PER_S,
    SUM_LATENCY_S,
    TYPE_OF,
    WALK,
)


@compiled
def gather(x: Any, w: Any, microbatches: int) -> bool:
    """Write the rows of a block; return whether every device holds what is always there.

    Limits on what stages recompute that are automatic are chosen, and written to the block.

    Args:
        x: the block.
        w: pointer to the memory of the walk.
        microbatches: that its stages run.
    """
    h, place = header(w, WALK), items(w, PLACE)
    rows = pointer_at(h.rows, ROWS)
    fit_limits(x, w, microbatches)
    for device in range(h.devices):
        place[device] = -1
    in_use = 0
    for r in range(x[1]):
        in_use = _add_device(x, r, w, rows, in_use)
    numbers = header(rows, ROWS)
    numbers.stages, numbers.replicas, numbers.devices = x[0], x[1], in_use
    numbers.microbatches, numbers.reductions, numbers.makers = microbatches, 0, 0
    several = 1 if in_use < x[1] else 0
    _set_rules(w, numbers, several)
    for s in range(x[0]):
        items(w, FIRST)[s] = replica_of(x, s)
        _write_stage(x, s, w, rows)
        for r in range(replica_of(x, s), replica_of(x, s + 1)):
            _write_replica(x, s, r, w, rows, several)
    items(w, FIRST)[x[0]] = x[1]
    gradients = pointer_at(h.gradients, GRADIENTS)
    note_stages(rows, gradients)
    if h.shares_state and header(gradients, GRADIENTS).tied_rows:
        _share_tied_state(x, w, rows)
    if several or (h.shares_state and header(gradients, GRADIENTS).tied_rows):
        _write_steps(x, w, rows)
    return _add_workspaces(x, w, rows)


@compiled
def _set_rules(w: Any, numbers: Any, several: int) -> None:
    """Have the runtime behave as it does with one stage a device, or with several."""
    rules, gradients = items(w, RULES), pointer_at(header(w, WALK).gradients, GRADIENTS)
    first = 6 * several
    numbers.send_blocks, numbers.receive_blocks = rules[first], rules[first + 1]
    numbers.exchange, numbers.one_stream = rules[first + 2], rules[first + 3]
    numbers.reduction_rule = rules[first + 4]
    header(gradients, GRADIENTS).has_buckets = rules[first + 5]


@compiled
def fit_limits(x: Any, w: Any, microbatches: int) -> None:
    """Choose what stages recompute where that is automatic: as little as they may.

    A stage has room for the microbatches in flight that 1F1B has; of a device that holds several
    stages each has a share in proportion to what it would need without recomputation.
    """
    h, needs, type_of = header(w, WALK), items(w, NEEDS), items(w, TYPE_OF)
    most = 0
    for r in range(x[1]):
        needs[device_of(x, r)] = 0.0
    for s in range(x[0]):
        rerun = max(0, rerun_of(x, s))
        for r in range(replica_of(x, s), replica_of(x, s + 1)):
            device = device_of(x, r)
            needs[device] += _need(x, s, type_of[device], rerun, w, microbatches)
    for s in range(x[0]):
        if rerun_of(x, s) == AUTOMATIC and h.may_rerun:
            least = _least_limit(x, s, w, microbatches)
            most = max(most, least)
            if not h.in_blocks:
                set_limits(x, s, least, offload_of(x, s))
    for s in range(x[0]):
        if rerun_of(x, s) == AUTOMATIC:
            set_limits(x, s, most, offload_of(x, s))
    for s in range(x[0]):
        for r in range(replica_of(x, s), replica_of(x, s + 1)):
            kind = type_of[device_of(x, r)]
            if r == replica_of(x, s) or type_of[device_of(x, r - 1)] != kind:
                _write_figures(x, s, kind, rerun_of(x, s), w)


@compiled
def _write_figures(x: Any, s: int, kind: int, rerun: int, w: Any) -> Any:
    """Write and return the figures of a stage on a type under a limit on recomputed layers."""
    h, holders = header(w, WALK), _holders(x, s, w)
    out, table = row(w, STAGE_FIGURES, s * h.types + kind), pointer_at(h.table, TABLE)
    begin, end = begin_of(x, s), end_of(x, s)
    stage_figures(table, kind, begin, end, rerun, offload_of(x, s), holders, out)
    return out


@compiled
def _least_limit(x: Any, s: int, w: Any, microbatches: int) -> int:
    """Return the least limit on recomputed layers with which a stage fits on all its devices."""
    least, layers = 0, header(w, WALK).layers
    for r in range(replica_of(x, s), replica_of(x, s + 1)):
        device = device_of(x, r)
        kind, room = items(w, TYPE_OF)[device], items(w, CAPACITY_BYTES)[device]
        all_need = items(w, NEEDS)[device]
        if all_need <= room:
            continue
        allowed = room * (_need(x, s, kind, 0, w, microbatches) / all_need)
        if _need(x, s, kind, least, w, microbatches) <= allowed:
            continue
        low, high = least, layers
        while high - low > 1:
            middle = (low + high) // 2
            if _need(x, s, kind, middle, w, microbatches) <= allowed:
                high = middle
            else:
                low = middle
        least = high
    return least


@compiled
def _need(x: Any, s: int, kind: int, rerun: int, w: Any, microbatches: int) -> float:
    """Return the bytes that a stage needs with the microbatches in flight that 1F1B has."""
    h, end, figures = header(w, WALK), end_of(x, s), _write_figures(x, s, kind, rerun, w)
    flight = min(in_flight(x, s), -(-microbatches // replicas_in(x, s)))
    kept = flight * (figures.stash_bytes - figures.offload_bytes) + figures.offload_bytes
    output = items(pointer_at(h.table, TABLE), CROSSING)[kind * (h.layers + 1) + end]
    return float(figures.static_bytes + figures.workspace_bytes + kept + output)


@compiled
def in_flight(x: Any, s: int) -> int:
    """Return how many microbatches a replica of a stage has in flight in 1F1B."""
    return -(-(x[1] - replica_of(x, s)) // replicas_in(x, s))


@compiled
def _holders(x: Any, s: int, w: Any) -> int:
    """Return how many devices share the optimizer's state of a stage."""
    h = header(w, WALK)
    return replicas_in(x, s) * h.copies * h.problem_copies if h.shares_state else 1


@compiled
def _write_stage(x: Any, s: int, w: Any, rows: Any) -> None:
    h = header(w, WALK)
    kind = items(w, TYPE_OF)[device_of(x, replica_of(x, s))]
    figures, stage = row(w, STAGE_FIGURES, s * h.types + kind), row(rows, STAGE, s)
    table, before = pointer_at(h.table, TABLE), kind * (h.layers + 1) + begin_of(x, s)
    after = kind * (h.layers + 1) + end_of(x, s)
    stage.first, stage.last = replica_of(x, s), replica_of(x, s + 1)
    stage.begin, stage.end, stage.rerun = begin_of(x, s), end_of(x, s), rerun_of(x, s)
    stage.stash_bytes = figures.stash_bytes
    stage.weight_stash_bytes = figures.weight_stash_bytes
    stage.input_bytes = items(table, CROSSING)[before]
    stage.output_bytes = items(table, CROSSING)[after]
    stage.input_gradient_bytes = items(table, CROSSING_GRADIENT)[before]
    stage.output_gradient_bytes = items(table, CROSSING_GRADIENT)[after]
    stage.offload_bytes = figures.offload_bytes
    stage.is_together = 0
    received = items(rows, RECEIVED_BYTES)
    received[2 * s] = items(table, RETURNED)[after] if s + 1 < x[0] else 0
    received[2 * s + 1] = items(table, SENT)[before] if s > 0 else 0


@compiled
def _add_device(x: Any, r: int, w: Any, rows: Any, in_use: int) -> int:
    """Write the row of a replica's device if it is new; return the devices in use."""
    device, place = device_of(x, r), items(w, PLACE)
    items(w, DEVICE_OF)[r] = device
    if place[device] >= 0:
        return in_use
    place[device] = in_use
    new = row(rows, DEVICE, in_use)
    new.number, new.capacity_bytes = device, items(w, CAPACITY_BYTES)[device]
    new.static_bytes, new.optimizer_s = 0, 0.0
    return in_use + 1


@compiled
def _write_replica(x: Any, s: int, r: int, w: Any, rows: Any, several: int) -> None:
    """Write the row of a replica, and add what it holds to its device."""
    device, host_s = device_of(x, r), items(w, HOST_S)
    kind = items(w, TYPE_OF)[device]
    figures = row(w, STAGE_FIGURES, s * header(w, WALK).types + kind)
    replica, seconds = row(rows, REPLICA, r), items(rows, SECONDS)
    more_s = host_s[3 * several]
    seconds[4 * r], seconds[4 * r + 1] = figures.B_s + more_s, figures.F_s + more_s
    seconds[4 * r + 2], seconds[4 * r + 3] = figures.I_s + more_s, figures.W_s + more_s
    items(w, EACH_S)[r] = seconds[4 * r] + seconds[4 * r + 1]
    for forward in range(2):
        bytes_ = items(rows, RECEIVED_BYTES)[2 * s + forward]
        message_s = host_s[3 * several + 1] + bytes_ / host_s[3 * several + 2]
        items(rows, RECEIVED_S)[2 * r + forward] = message_s + _gather_s(x, s, forward, device, w)
    replica.stage, replica.device = s, items(w, PLACE)[device]
    held = row(rows, DEVICE, replica.device)
    held.static_bytes += figures.static_bytes
    held.optimizer_s = _step_s(device, figures.step_traffic, figures.summed_bytes, w)
    replica.copy_s = 0.0
    if figures.offload_bytes:
        rate = items(w, HOST_LINK_GB_PER_S)[device]
        replica.copy_s = figures.offload_bytes / (rate * 1e9)


@compiled
def _step_s(device: int, moved: float, summed: int, w: Any) -> float:
    """Return the seconds of a device's step that moves and, in its group, sums so many bytes."""
    return moved / (items(w, OPTIMIZER_GB_PER_S)[device] * 1e9) + _sum_s(device, summed, w)


@compiled
def _share_tied_state(x: Any, w: Any, rows: Any) -> None:
    """Have all devices that hold a tied parameter share its state, instead of a stage's own."""
    h = header(w, WALK)
    table, gradients = pointer_at(h.table, TABLE), pointer_at(h.gradients, GRADIENTS)
    t = header(table, TABLE)
    for s in range(x[0]):
        for n in range(header(gradients, GRADIENTS).tied_rows):
            parameter = items(gradients, TIED)[n]
            if not _holds(x, s, parameter, table):
                continue
            shared = holders_of(rows, gradients, parameter, s) * h.copies * h.problem_copies
            for r in range(replica_of(x, s), replica_of(x, s + 1)):
                first = items(w, TYPE_OF)[device_of(x, r)] * t.holders
                own = (first + min(_holders(x, s, w), t.holders) - 1) * t.parameters + parameter
                other = (first + min(shared, t.holders) - 1) * t.parameters + parameter
                more = items(table, STATIC)[other] - items(table, STATIC)[own]
                row(rows, DEVICE, row(rows, REPLICA, r).device).static_bytes += more


@compiled
def _write_steps(x: Any, w: Any, rows: Any) -> None:
    """Write the steps of devices whose stages share parameters with each other or with others."""
    h = header(w, WALK)
    table, gradients = pointer_at(h.table, TABLE), pointer_at(h.gradients, GRADIENTS)
    start, held, before = items(table, HELD_START), items(table, HELD), items(table, HELD_BEFORE)
    parameters = header(table, TABLE).parameters
    for place in range(header(rows, ROWS).devices):
        device, moved, summed = row(rows, DEVICE, place).number, 0.0, 0
        first = items(w, TYPE_OF)[device] * parameters
        for s in range(x[0]):
            if not has_device(x, s, device):
                continue
            for i in range(start[begin_of(x, s)], start[end_of(x, s)]):
                if before[i] >= 0 and _is_counted(x, s, device, held[i], before[i], table):
                    continue
                holders = 1
                if h.shares_state:
                    holders = holders_of(rows, gradients, held[i], s) * h.copies * h.problem_copies
                moved += items(table, TRAFFIC)[first + held[i]] / holders
                summed += items(table, SUMMED)[first + held[i]]
        row(rows, DEVICE, place).optimizer_s = _step_s(device, moved, summed, w)


@compiled
def _is_counted(x: Any, s: int, device: int, parameter: int, before: int, table: Any) -> bool:
    """Return whether an earlier layer of a device's stages uses a parameter too."""
    if before >= begin_of(x, s):
        return True
    for other in range(s):
        if has_device(x, other, device) and _holds(x, other, parameter, table):
            return True
    return False


@compiled
def add_collectives(x: Any, w: Any) -> None:
    """Have operations of stages whose weights are divided take their collectives as well."""
    h = header(w, WALK)
    rows, table = pointer_at(h.rows, ROWS), pointer_at(h.table, TABLE)
    several = 3 if header(rows, ROWS).devices < x[1] else 0
    for r in range(x[1]):
        stage = row(rows, STAGE, row(rows, REPLICA, r).stage)
        kind, seconds = items(w, TYPE_OF)[device_of(x, r)], items(rows, SECONDS)
        for what in range(4):
            gradients = pointer_at(h.gradients, GRADIENTS)
            all_s = seconds_with_collectives(table, gradients, stage, kind, what)
            seconds[4 * r + what] = all_s + items(w, HOST_S)[several]
        items(w, EACH_S)[r] = seconds[4 * r] + seconds[4 * r + 1]


@compiled
def _holds(x: Any, s: int, parameter: int, table: Any) -> bool:
    start = items(table, HELD_START)
    for i in range(start[begin_of(x, s)], start[end_of(x, s)]):
        if items(table, HELD)[i] == parameter:
            return True
    return False


@compiled
def _gather_s(x: Any, s: int, forward: int, device: int, w: Any) -> float:
    """Return the seconds in which a group gathers what it got in parts."""
    h = header(w, WALK)
    is_end = s == 0 if forward else s + 1 == x[0]
    if items(w, GROUP_DEVICES)[device] == 1 or is_end:
        return 0.0
    table, type_of = pointer_at(h.table, TABLE), items(w, TYPE_OF)
    if forward:
        other = type_of[device_of(x, replica_of(x, s - 1))]
        bytes_ = items(table, GATHERED)[other * (h.layers + 1) + begin_of(x, s)]
    else:
        other = type_of[device_of(x, replica_of(x, s + 1))]
        bytes_ = items(table, RETURNED_GATHERED)[other * (h.layers + 1) + end_of(x, s)]
    return _faster_s(items(w, GATHER_LATENCY_S), items(w, GATHER_GB_PER_S), device, bytes_)


@compiled
def _sum_s(device: int, bytes_: int, w: Any) -> float:
    """Return the seconds in which a group sums gradients of what its devices have whole."""
    members = items(w, GROUP_DEVICES)[device]
    if members == 1:
        return 0.0
    part = bytes_ // members
    return _faster_s(items(w, SUM_LATENCY_S), items(w, SUM_GB_PER_S), device, part)


@compiled
def _faster_s(latency_s: Any, gb_per_s: Any, device: int, bytes_: int) -> float:
    """Return the seconds of the faster of a group's two ways."""
    if bytes_ == 0:
        return 0.0
    one_s = latency_s[2 * device] + bytes_ / (gb_per_s[2 * device] * 1e9)
    return min(one_s, latency_s[2 * device + 1] + bytes_ / (gb_per_s[2 * device + 1] * 1e9))


@compiled
def _add_workspaces(x: Any, w: Any, rows: Any) -> bool:
    """Add the largest workspace of each device; return whether all devices hold what they must."""
    types, in_use, largest = header(w, WALK).types, header(rows, ROWS).devices, items(w, NEEDS)
    type_of, fits = items(w, TYPE_OF), True
    for place in range(in_use):
        largest[place] = 0.0
    for s in range(x[0]):
        for r in range(replica_of(x, s), replica_of(x, s + 1)):
            figures = row(w, STAGE_FIGURES, s * types + type_of[device_of(x, r)])
            place = row(rows, REPLICA, r).device
            largest[place] = max(largest[place], float(figures.workspace_bytes))
            fits = fits and figures.may_run == 1
    for s in range(x[0]):
        for r in range(replica_of(x, s), replica_of(x, s + 1)):
            figures = row(w, STAGE_FIGURES, s * types + type_of[device_of(x, r)])
            counted = int(largest[row(rows, REPLICA, r).device])
            row(rows, REPLICA, r).split_extra_bytes = max(
                0, figures.split_workspace_bytes - counted
            )
    for place in range(in_use):
        held = row(rows, DEVICE, place)
        held.static_bytes += int(largest[place])
        fits = fits and held.static_bytes <= held.capacity_bytes
    return fits
