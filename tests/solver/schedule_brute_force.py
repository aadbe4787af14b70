"""The best schedule of a tiny pipeline by trying every order, with rules of its own.

It knows integers only: seconds and bytes by stage. Times are longest paths, memory is a sum
over what is resident; nothing here is shared with the planner. Each kind of operation of a stage
runs its microbatches in order, which loses nothing since they are equal, unless tensors on their
way take memory; ``any_order`` tries the others as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, permutations, product

from builders import boundary, cluster, device_type, graph, link

from planner.artifacts.job import Job
from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline, StageSpec, place

Step = tuple[int, str, int]
"""Stage, kind (F, B, I or W) and microbatch."""
Rows = dict[str, tuple[Step, ...]]
MIB = 2**20
FAST = 1e15
"""GB/s: what the bytes themselves take is lost in rounding, so that equal times are equal."""


@dataclass(frozen=True)
class TinyPipeline:
    """Stages by their seconds and MiB; transfers never wait for each other.

    Attributes:
        forward, input_gradient, weight_gradient: seconds of one microbatch, by stage.
        send: to the next stage and back; an entry less; 0 on the same device.
        kept: MiB a stage's layer keeps from its forward until its gradient.
        kept_for_weights: MiB from the input gradient until the weight gradient.
        cut: MiB of the tensor that goes on to the next stage; an entry less. It belongs to both
            stashes of the stage that receives it.
        device: number of the device that holds a stage.
        room: MiB that each device has beside a stage's workspace.
        optimizer: seconds of the optimizer step, by device.
        microbatches: their number.
        saved: seconds by which a whole backward is shorter than its halves, by stage; none if
            not given.
        whole: stage and microbatch of the backwards that are not split where others are.
    """

    forward: Sequence[int]
    input_gradient: Sequence[int]
    weight_gradient: Sequence[int]
    send: Sequence[int]
    kept: Sequence[int]
    kept_for_weights: Sequence[int]
    cut: Sequence[int]
    device: Sequence[int]
    room: Sequence[int]
    optimizer: Sequence[int]
    microbatches: int
    saved: Sequence[int] = ()
    whole: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def placed(self) -> PlacedPipeline:
        """For the planner."""
        specs = [StageSpec((f"l{s}",), (f"d{d}",)) for s, d in enumerate(self.device)]
        return place(self.problem, specs)

    @cached_property
    def problem(self) -> Problem:
        """A layer a stage, measured; a device type of its own for every device."""
        layers, parameters = [], []
        for s, d in enumerate(self.device):
            row = {
                "name": f"l{s}",
                "stash_bytes": self.kept[s] * MIB,
                "weight_stash_bytes": self.kept_for_weights[s] * MIB,
                "measured": {
                    f"t{d}": {
                        "forward_s": self.forward[s],
                        "input_gradient_s": self.input_gradient[s],
                        "weight_gradient_s": self.weight_gradient[s],
                        "backward_s": self.length((s, "B", 0)),
                    }
                },
            }
            works = ("forward", "input_gradient", "weight_gradient")
            nothing = {f"{w}_{what}": 0 for w in works for what in ("flops", "traffic_bytes")}
            # The optimizer moves 12 bytes of each element; a stage a device has the parameter.
            if self.device.index(d) == s and self.optimizer[d]:
                parameters.append({"name": f"p{s}", "elements": 1, "bytes": 4, "trainable": True})
                row["parameters"] = [f"p{s}"]
            layers.append({**nothing, **row})
        cuts = [
            boundary(f"l{s}", f"l{s + 1}", bytes_=bytes_) for s, bytes_ in enumerate(self.cut_bytes)
        ]
        the_graph = graph(layers, cuts, parameters)
        job = Job(microbatches=self.microbatches, optimizer="sgd", max_stages_per_device=8)
        return Problem(the_graph, self._cluster(), job)

    @cached_property
    def cut_bytes(self) -> list[int]:
        """A byte at least goes on where a transfer takes time."""
        return [max(c * MIB, 1) if t else c * MIB for c, t in zip(self.cut, self.send, strict=True)]

    def _cluster(self) -> object:
        types = {
            f"t{d}": device_type(
                memory_gib=self.capacity_bytes(d) / 2**30,
                memory_bandwidth_gb_per_s=12e-9 / (self.optimizer[d])
                if self.optimizer[d]
                else 1000,
            )
            for d in range(len(self.room))
        }
        links: dict[tuple[int, int], dict] = {}
        for (u, v), time in zip(pairwise(self.device), self.send, strict=True):
            if u != v:
                first, second = f"d{min(u, v)}", f"d{max(u, v)}"
                links[min(u, v), max(u, v)] = link(
                    first, second, FAST, latency_us=time * 10**6, shared=True
                )
        devices = {f"d{d}": f"t{d}" for d in range(len(self.room))}
        return cluster(devices, [*links.values()], types=types)

    # --- the rules, once more -----------------------------------------------------------------

    @property
    def stages(self) -> range:
        """Their numbers."""
        return range(len(self.forward))

    def static_bytes(self, device: int) -> int:
        """Workspace of twice the tensor that a stage hands on; 4-byte weights and gradients."""
        held = [s for s in self.stages if self.device[s] == device]
        workspace = sum(2 * self.cut_bytes[s] for s in held if s < len(self.cut))
        return workspace + (8 if self.optimizer[device] else 0)

    def capacity_bytes(self, device: int) -> int:
        """Static memory, the room and a few bytes for the single bytes on their way."""
        return self.static_bytes(device) + self.room[device] * MIB + 1024

    def received_bytes(self, stage: int) -> int:
        """The tensor from the stage before."""
        return self.cut_bytes[stage - 1] if stage else 0

    def sent_bytes(self, stage: int) -> int:
        """The tensor to the next stage."""
        return self.cut_bytes[stage] if stage < len(self.cut) else 0

    def stash_bytes(self, stage: int) -> int:
        """From the forward until the gradient."""
        return self.kept[stage] * MIB + self.received_bytes(stage)

    def weight_stash_bytes(self, stage: int) -> int:
        """From the input gradient until the weight gradient."""
        return self.kept_for_weights[stage] * MIB + self.received_bytes(stage)

    def length(self, step: Step) -> int:
        """Seconds."""
        stage, kind, _ = step
        both = self.input_gradient[stage], self.weight_gradient[stage]
        whole = sum(both) - (self.saved[stage] if self.saved else 0)
        return {"F": self.forward[stage], "B": whole, "I": both[0], "W": both[1]}[kind]

    def kinds(self, stage: int, microbatch: int, split: bool) -> str:
        """Of the operations that it runs."""
        return "FIW" if split and (stage, microbatch) not in self.whole else "FB"

    def gradient(self, stage: int, kind: str, microbatch: int) -> Step:
        """Of another stage, where this one's is of a kind."""
        if self.whole:
            kind = "B" if (stage, microbatch) in self.whole else "I"
        return stage, kind, microbatch

    def needs(self, step: Step) -> Step | None:
        """The operation whose result it waits for; it takes ``delay`` seconds to arrive."""
        stage, kind, microbatch = step
        if kind == "F":
            return (stage - 1, "F", microbatch) if stage else None
        if kind == "W":
            return (stage, "I", microbatch)
        if stage == self.stages[-1]:
            return stage, "F", microbatch
        return self.gradient(stage + 1, kind, microbatch)

    def delay(self, before: int, stage: int) -> int:
        """Seconds between the devices of two stages next to each other."""
        if before == stage or self.device[before] == self.device[stage]:
            return 0
        return self.send[min(before, stage)]


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
        weight = (stage, "W", microbatch)
        rows.append((end, start[weight] + tiny.length(weight), tiny.weight_stash_bytes(stage)))


# --- drawing ------------------------------------------------------------------------------------

SHAPES = (
    # devices of the stages, microbatches, split
    ((0,), 1, True),
    ((0,), 3, True),
    ((0,), 4, True),
    ((0,), 4, False),
    ((0, 1), 1, True),
    ((0, 1), 2, True),
    ((0, 1), 3, True),
    ((0, 1), 3, False),
    ((0, 1), 4, False),
    ((0, 1, 2), 1, True),
    ((0, 1, 2), 2, True),
    ((0, 1, 2), 2, False),
    ((0, 1, 2), 3, False),
    ((0, 1, 2), 4, False),
    ((0, 1, 0), 2, False),
    ((0, 0), 2, True),
    ((0, 1, 0), 1, True),
    ((0, 1, 1), 2, False),
    ((0, 1, 1, 0), 2, False),
    ((0, 1, 0, 1), 2, False),
)


def draw_tiny(
    rng: random.Random,
    device: Sequence[int],
    microbatches: int,
    *,
    zeros: bool = False,
    buffers: bool = False,
    optimizer: bool = False,
) -> TinyPipeline:
    """A random one, with room from one stash to all of them."""
    count = len(device)
    least = 0 if zeros else 1
    times = [[rng.randint(least, 4) for _ in range(count)] for _ in range(3)]
    # On one pair of devices all transfers take the same time.
    between: dict[frozenset[int], int] = {}
    for pair in pairwise(device):
        between.setdefault(frozenset(pair), rng.choice([0, 0, 1, 2]) if len({*pair}) > 1 else 0)
    send = [between[frozenset(pair)] for pair in pairwise(device)]
    kept = [rng.randint(0 if rng.random() < 0.2 else 1, 3) for _ in range(count)]
    late = [rng.choice([0, 1, k, k, k + 1]) for k in kept]
    cut = [rng.choice([0, 1, 2]) if buffers else 0 for _ in range(count - 1)]
    holders = [[s for s in range(count) if device[s] == d] for d in sorted(set(device))]
    room = []
    for held in holders:
        each = sum(kept[s] + (cut[s - 1] if s else 0) for s in held)
        # Even less where forwards may take no time: what is held for no time is not counted.
        room.append(each + rng.randint(-each * zeros, max(each, 1) * microbatches))
    steps = [rng.randint(0, 3) if optimizer else 0 for _ in holders]
    return TinyPipeline(
        *times, send, kept, late, cut, tuple(device), tuple(room), tuple(steps), microbatches
    )
