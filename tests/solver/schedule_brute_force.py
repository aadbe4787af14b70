"""The best schedule of a tiny pipeline by trying every order, with rules of its own.

Times are longest paths, memory is a sum over what is resident; nothing here is shared with the
planner. Each kind of operation of a stage runs its microbatches in order, which loses nothing since
they are equal, unless tensors on their way take memory; ``any_order`` tries the others as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

from tiny_pipelines import Step, TinyPipeline


@dataclass
class Best:
    """Seconds; infinity if nothing fits."""

    makespan: float = float("inf")
    longest_span: float = float("inf")
    tried: int = 0
    fitting: int = field(default=0)


def brute_force(tiny: TinyPipeline, *, split: bool, any_order: bool = False) -> Best:
    """The least makespan and the least longest span over all orders within memory."""
    best = Best()
    devices = sorted(set(tiny.device))
    by_device = [[*orders_of_device(tiny, d, split, any_order)] for d in devices]
    for choice in product(*by_device):
        best.tried += 1
        start = start_times(tiny, choice)
        if start is None:
            continue
        makespan = makespan_of(tiny, choice, start)
        span = longest_own_way(tiny, choice)
        if makespan >= best.makespan and span >= best.longest_span:
            continue
        if not fits(tiny, start):
            continue
        best.fitting += 1
        best.makespan = min(best.makespan, makespan)
        if span < best.longest_span:
            best.longest_span = min(best.longest_span, least_longest_span(tiny, choice))
    return best


def brute_force_of_any_halves(tiny: TinyPipeline) -> Best:
    """The least over every choice of whole and split backwards."""
    backwards = [*product(tiny.stages, range(tiny.microbatches))]
    best = Best()
    for chosen in product((False, True), repeat=len(backwards)):
        whole = frozenset(key for key, is_whole in zip(backwards, chosen, strict=True) if is_whole)
        found = brute_force(replace(tiny, whole=whole), split=True)
        best.makespan = min(best.makespan, found.makespan)
        best.longest_span = min(best.longest_span, found.longest_span)
    return best


def orders_of_device(
    tiny: TinyPipeline, device: int, split: bool, any_order: bool
) -> Iterator[tuple[Step, ...]]:
    """Every order of a device's operations that keeps to its memory, but for tensors on the way."""
    held = [s for s in tiny.stages if tiny.device[s] == device]
    room = tiny.capacity_bytes(device) - tiny.static_bytes(device)
    kinds = {key: tiny.kinds(*key, split) for key in product(held, range(tiny.microbatches))}
    total = sum(map(len, kinds.values()))

    def extend(order: list[Step], done: set[Step], bytes_: int) -> Iterator[tuple[Step, ...]]:
        if len(order) == total:
            yield tuple(order)
            return
        for stage, kind in product(held, "FBIW"):
            for microbatch in range(tiny.microbatches):
                step = (stage, kind, microbatch)
                if step in done or kind not in kinds[stage, microbatch]:
                    continue
                before = tiny.needs(step)
                forward = (stage, "F", microbatch)
                is_ready = before is None or before[0] not in held or before in done
                if is_ready and (kind == "F" or forward in done):
                    after = bytes_ + change(tiny, step)
                    # What is held for no time at all is not counted.
                    fits_now = after + tiny.sent_bytes(stage) <= room
                    if kind != "F" or not tiny.length(step) or fits_now:
                        yield from extend([*order, step], done | {step}, after)
                if not any_order:
                    break

    return extend([], set(), 0)


def change(tiny: TinyPipeline, step: Step) -> int:
    """Bytes of stash that an operation leaves, or frees."""
    stage, kind, _ = step
    stash, late = tiny.stash_bytes(stage), tiny.weight_stash_bytes(stage)
    return {"F": stash, "B": -stash, "I": late - stash, "W": -late}[kind]


def start_times(tiny: TinyPipeline, choice: Sequence[Sequence[Step]]) -> dict[Step, int] | None:
    """When everything starts if nothing waits without need; None if the orders deadlock."""
    start: dict[Step, int] = {}
    at = [0] * len(choice)
    free = [0] * len(choice)
    left = sum(map(len, choice))
    while left:
        moved = False
        for number, order in enumerate(choice):
            while at[number] < len(order):
                step = order[at[number]]
                begin = free[number]
                before = tiny.needs(step)
                if before is not None:
                    if before not in start:
                        break
                    arrival = start[before] + tiny.length(before) + tiny.delay(before[0], step[0])
                    begin = max(begin, arrival)
                start[step] = begin
                free[number] = begin + tiny.length(step)
                at[number] += 1
                left -= 1
                moved = True
        if not moved:
            return None
    return start


def makespan_of(
    tiny: TinyPipeline, choice: Sequence[Sequence[Step]], start: Mapping[Step, int]
) -> int:
    """Until the last optimizer step has ended."""
    ends = []
    for order in choice:
        step = order[-1]
        ends.append(start[step] + tiny.length(step) + tiny.optimizer[tiny.device[step[0]]])
    return max(ends)


def ways_from(
    tiny: TinyPipeline, choice: Sequence[Sequence[Step]], first: Step
) -> dict[Step, int | None]:
    """The longest way from the start of an operation to the start of each other; None: no way."""
    way: dict[Step, int | None] = {}
    at = [0] * len(choice)
    while any(at[n] < len(order) for n, order in enumerate(choice)):
        for number, order in enumerate(choice):
            while at[number] < len(order):
                step = order[at[number]]
                before = tiny.needs(step)
                if before is not None and before not in way:
                    break
                found = [0] if step == first else []
                if before is not None and way[before] is not None:
                    wait = tiny.length(before) + tiny.delay(before[0], step[0])
                    found.append(way[before] + wait)  # type: ignore[operator]
                if at[number]:
                    previous = order[at[number] - 1]
                    if way[previous] is not None:
                        found.append(way[previous] + tiny.length(previous))  # type: ignore[operator]
                way[step] = max(found, default=None)
                at[number] += 1
    return way


def first_and_last(
    tiny: TinyPipeline, choice: Sequence[Sequence[Step]]
) -> dict[int, tuple[Step, Step]]:
    """The first and the last operation of every stage."""
    found = {}
    for order in choice:
        for stage in {step[0] for step in order}:
            own = [step for step in order if step[0] == stage]
            found[stage] = own[0], own[-1]
    return found


def longest_own_way(tiny: TinyPipeline, choice: Sequence[Sequence[Step]]) -> int:
    """No start times give a smaller longest span: the longest way through one stage."""
    longest = 0
    for first, last in first_and_last(tiny, choice).values():
        way = ways_from(tiny, choice, first)[last]
        assert way is not None
        longest = max(longest, way + tiny.length(last))
    return longest


def least_longest_span(tiny: TinyPipeline, choice: Sequence[Sequence[Step]]) -> float:
    """The least longest span of given orders, over all start times.

    Stage i's first operation starts at least a way of length L(i, j) before stage j's last one
    ends, and that at most T after stage j's first one starts. Round a cycle of stages these add
    up: T is the largest mean of L over any cycle.
    """
    rows = first_and_last(tiny, choice)
    length: dict[tuple[int, int], int] = {}
    for i, (first, _) in rows.items():
        way = ways_from(tiny, choice, first)
        for j, (_, last) in rows.items():
            found = way[last]
            if found is not None:
                length[i, j] = found + tiny.length(last)
    best = 0.0
    for size in range(1, len(rows) + 1):
        for cycle in permutations(rows, size):
            edges = [*zip(cycle, (*cycle[1:], cycle[0]), strict=True)]
            if all(edge in length for edge in edges):
                best = max(best, sum(length[edge] for edge in edges) / size)
    return best


def fits(tiny: TinyPipeline, start: Mapping[Step, float]) -> bool:
    """Whether every device has room for all that is resident, at every moment."""
    return all(
        peak <= tiny.capacity_bytes(device) - tiny.static_bytes(device)
        for device, peak in peaks(tiny, start).items()
    )


def peaks(tiny: TinyPipeline, start: Mapping[Step, float]) -> dict[int, int]:
    """The most bytes beside the static ones that each device holds at any moment."""
    stays: dict[int, list[tuple[float, float, int]]] = {d: [] for d in tiny.device}
    for step, begin in start.items():
        _residents(tiny, start, step, begin, stays)
    return {
        device: max(
            (sum(b for since, until, b in rows if since <= at < until) for at, _, _ in rows),
            default=0,
        )
        for device, rows in stays.items()
    }


def _residents(
    tiny: TinyPipeline,
    start: Mapping[Step, float],
    step: Step,
    begin: float,
    stays: dict[int, list[tuple[float, float, int]]],
) -> None:
    stage, kind, microbatch = step
    rows = stays[tiny.device[stage]]
    end = begin + tiny.length(step)
    if kind == "F":
        gradient = (stage, "B" if (stage, "B", microbatch) in start else "I", microbatch)
        freed = start[gradient] + tiny.length(gradient)
        rows.append((begin, freed, tiny.stash_bytes(stage)))
        if stage:
            sent = start[stage - 1, "F", microbatch] + tiny.length((stage - 1, "F", microbatch))
            rows.append((sent, begin, tiny.received_bytes(stage)))
        if stage < tiny.stages[-1]:
            rows.append((begin, end + tiny.delay(stage, stage + 1), tiny.sent_bytes(stage)))
    if kind in "BI":
        if stage:
            # To the stage before goes the gradient of what came from it.
            rows.append((begin, end + tiny.delay(stage, stage - 1), tiny.received_bytes(stage)))
        if stage < tiny.stages[-1]:
            later = tiny.gradient(stage + 1, kind, microbatch)
            rows.append((start[later] + tiny.length(later), end, tiny.sent_bytes(stage)))
    if kind == "I":
        rows.append((begin, end, tiny.apart_bytes(stage)))
        weight = (stage, "W", microbatch)
        rows.append((end, start[weight] + tiny.length(weight), tiny.weight_stash_bytes(stage)))
