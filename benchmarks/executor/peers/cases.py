"""What is compared: a model, a schedule, and the plan that runs torch's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from planner import Cluster, Job, Problem
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource
from planner.tracing.trace import trace

Schedule = Literal["1f1b", "interleaved 1f1b", "interleaved zero bubble", "zb-v"]
SCHEDULES: tuple[Schedule, ...] = (
    "1f1b",
    "interleaved 1f1b",
    "interleaved zero bubble",
    "zb-v",
)
FACTORIES = {
    "gpt": "benchmarks.executor.peers.models:untied_gpt",
    "llama": "models.llama:llama_tiny",
}
BLOCKS = {"gpt": "h.", "llama": "layers."}
"""How the layers that may be distributed begin; what comes before and after goes to the ends."""
MID_SIZE: dict[str, dict[str, int]] = {
    "gpt": {"layers": 8, "width": 256, "heads": 4, "sequence_length": 128},
    "llama": {"layers": 8, "width": 256, "heads": 4, "ffn": 704, "sequence_length": 128},
}
"""Operations of 5 to 20 ms on one core of a few years ago."""


@dataclass(frozen=True)
class Case:
    """One model under one schedule.

    Attributes:
        model: of :data:`FACTORIES`.
        schedule: with one stage a rank (1F1B) or two.
        ranks: processes, of one thread each.
        microbatches: of an iteration.
        samples: of a microbatch.
        arguments: of the model's factory.
    """

    model: str
    schedule: Schedule
    ranks: int = 2
    microbatches: int = 8
    samples: int = 1
    arguments: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def mid_size(cls, model: str, schedule: Schedule, ranks: int = 2) -> Case:
        """A model of real work."""
        return cls(model, schedule, ranks, arguments=MID_SIZE[model])

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage: in turn, or down and up again for the V."""
        once = tuple(range(self.ranks))
        if self.schedule == "1f1b":
            return once
        return (*once, *reversed(once)) if self.schedule == "zb-v" else (*once, *once)

    def block_ranges(self) -> list[range]:
        """The blocks of each stage: as many for all, the first ones take what is left over."""
        count, stages = self.arguments["layers"], len(self.stage_ranks)
        bounds = [-(-count * index // stages) for index in range(stages + 1)]
        return [range(a, b) for a, b in pairwise(bounds)]

    def as_data(self) -> dict[str, Any]:
        """Plain data, to hand to another process."""
        return asdict(self)


def plan_of(case: Case, orders: Sequence[Sequence[Operation]]) -> Plan:
    """The plan that gives each rank its order."""
    job = Job(
        samples_per_microbatch=case.samples,
        microbatches=case.microbatches,
        optimizer="sgd",
        max_stages_per_device=2,
        model_arguments=dict(case.arguments),
    )
    source = ModelSource(FACTORIES[case.model], dict(case.arguments))
    graph = trace(FACTORIES[case.model], job)
    problem = Problem(graph, _cluster(case.ranks), job, source)
    parts = _stage_layers(case, list(graph.layers))
    on = zip(parts, case.stage_ranks, strict=True)
    pipeline = place(problem, [StageSpec(tuple(part), (f"d{rank}",)) for part, rank in on])
    return plan_by_hand(pipeline, {f"d{rank}": list(order) for rank, order in enumerate(orders)})


def _stage_layers(case: Case, layers: Sequence[str]) -> list[list[str]]:
    prefix = BLOCKS[case.model]
    stage_of = {f"{prefix}{k}": s for s, part in enumerate(case.block_ranges()) for k in part}
    found: list[list[str]] = [[] for _ in case.stage_ranks]
    stage = 0
    for name in layers:
        is_after = name not in stage_of and stage > 0
        stage = len(found) - 1 if is_after else stage_of.get(name, 0)
        found[stage].append(name)
    return found


def _cluster(ranks: int) -> Cluster:
    kind = {
        "memory_gib": 64,
        "memory_bandwidth_gb_per_s": 10,
        "peak_tflop_per_s": {"float32": 0.1},
        "efficiency": 1,
        "reserved_gib": 0,
    }
    names = [f"d{rank}" for rank in range(ranks)]
    links = [{"between": [name, "memory"], "bandwidth_gb_per_s": 5} for name in names]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "one machine",
            "device_types": {"core": kind},
            "devices": [{"name": name, "type": "core"} for name in names],
            "switches": ["memory"],
            "links": links,
        }
    )
