"""Pipelines small enough to try every order of, for the planner and for a search of the tests' own.

They know integers only: seconds and bytes by stage. What the rules say of them is said here once
more; nothing of it is shared with the planner.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from builders import boundary, cluster, device_type, graph, link

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.plan.problem import Problem
from planner.space import Backward

Step = tuple[int, str, int]
"""Stage, kind (F, B, I or W) and microbatch."""
MIB = 2**20
FAST = 1e15
"""GB/s: what the bytes themselves take is lost in rounding, so that equal times are equal."""

SOLVED_SHAPES = [
    ((0,), 4, True),
    ((0, 1), 3, False),
    ((0, 1), 3, True),
    ((0, 1, 2), 3, False),
    ((0, 1, 0), 2, False),
    ((0, 1, 1, 0), 2, False),
]
"""The device of each stage, microbatches, and whether backwards are split, in cases that searches
of schedules must solve."""
A_LITTLE = 1 + 1e-9
TICK = 1 + 2e-5
"""Every one of a few dozen durations is rounded down to a millionth of the makespan."""


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
        backward: kinds that the job allows.
        weights: MiB of a stage's parameter, and as many of its gradient; none if not given. Only
            without optimizer steps.
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
    backward: Backward = "any"

    @cached_property
    def placed(self) -> PlacedPipeline:
        """For the planner."""
        return place(self.problem, self.specs)

    @property
    def specs(self) -> list[StageSpec]:
        """A layer a stage."""
        return [StageSpec((f"l{s}",), (f"d{d}",)) for s, d in enumerate(self.device)]

    @cached_property
    def problem(self) -> Problem:
        """A layer a stage, measured; a device type of its own for every device."""
        layers, parameters = [], []
        for s, d in enumerate(self.device):
            row = {
                "name": f"l{s}",
                "stash_bytes": self.kept[s] * MIB,
                "weight_stash_bytes": self.kept_for_weights[s] * MIB,
                "peak_bytes": self.kept[s] * MIB + 2 * self.sent_bytes(s),
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
        job = Job(
            microbatches=self.microbatches,
            optimizer="sgd",
            max_stages_per_device=8,
            backward=self.backward,
        )
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
                else FAST,
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
        """Workspace of twice the tensor that a stage hands on; weights and gradients."""
        return self._workspace_bytes(device) + (8 if self.optimizer[device] else 0)

    def _workspace_bytes(self, device: int) -> int:
        held = [s for s in self.stages if self.device[s] == device]
        return max((2 * self.sent_bytes(s) for s in held), default=0)

    def apart_bytes(self, stage: int) -> int:
        """Beside the static bytes while an input gradient runs apart."""
        more = max(0, self.kept_for_weights[stage] - self.kept[stage]) * MIB
        return max(0, 2 * self.sent_bytes(stage) + more - self._workspace_bytes(self.device[stage]))

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
