"""The models and plans that predictions are checked on: two ranks, each on a core of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from planner import Cluster, Job, ModelSource, Plan, Problem, solve, trace
from planner.assembly import plan_by_hand
from planner.costs.placement import PlacedPipeline, StageSpec, place
from planner.interop.calibrate.costs import with_profile
from planner.model.measured_costs import Costs
from planner.search.partition.baselines import BASELINES
from planner.search.partition.chain import Chain
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import classic_orders

MICROBATCHES = 4
RANKS = 2


@dataclass(frozen=True)
class Model:
    """A model and the size of its microbatches.

    Attributes:
        name: in the report.
        factory: ``module:factory``.
        samples: of a microbatch.
        arguments: of the factory.
    """

    name: str
    factory: str
    samples: int = 4
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """The training job."""
        return Job(
            samples_per_microbatch=self.samples,
            microbatches=MICROBATCHES,
            max_stages_per_device=2,
            model_arguments=dict(self.arguments),
        )


_WIDE = {"width": 256, "heads": 8}
MODELS = (
    Model("gpt", "models.gpt:gpt_tiny", 4, {**_WIDE, "layers": 8, "sequence_length": 128}),
    Model(
        "llama",
        "models.llama:llama_tiny",
        4,
        {**_WIDE, "kv_heads": 4, "ffn": 704, "layers": 8, "sequence_length": 128},
    ),
    Model("bert", "models.bert:bert_tiny", 4, {**_WIDE, "layers": 6, "sequence_length": 128}),
    Model(
        "t5",
        "models.t5:t5_tiny",
        4,
        {**_WIDE, "head_size": 32, "ffn": 1024, "layers": 3, "sequence_length": 96},
    ),
    Model("resnet50", "models.resnet:resnet50", 2, {"image_size": 96, "classes": 100}),
    Model("unet", "models.unet:unet", 1, {"image_size": 64}),
)


def cluster(device_type: str = "CPU-core") -> Cluster:
    """The cluster: one process of this machine per rank."""
    names = [f"process{number}" for number in range(RANKS)]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "this_machine",
            "switches": ["loopback"],
            "devices": [{"name": name, "type": device_type} for name in names],
            "links": [{"between": [name, "loopback"], "preset": "loopback"} for name in names],
        }
    )


def problem_of(model: Model, costs: Costs | None) -> Problem:
    """A model on the cluster, with the times of its profile, if any."""
    job, machines = model.job, cluster()
    graph = trace(model.factory, job)
    if costs is not None:
        graph = with_profile(graph, machines, costs, f"the profile of {model.name}")
    return Problem(graph, machines, job, ModelSource(model.factory, dict(model.arguments)))


def plans_of(problem: Problem, *, time_limit_s: float) -> Iterator[tuple[str, Plan]]:
    """Four plans by name: ours, and three that exercise what ours may leave out."""
    yield "pipeplan", solve(problem, time_limit_s=time_limit_s).plan
    chain = Chain(problem)
    even = place(problem, chain.specs(BASELINES["even"].plan(chain)))
    yield "even, 1F1B", _classic(even, "1f1b")
    yield "even, zero bubble", _classic(even, "zb-h1", split=True)
    yield "interleaved, recomputed", _classic(_interleaved(problem), "interleaved")


def _classic(pipeline: PlacedPipeline, name: str, *, split: bool = False) -> Plan:
    owner = balanced_assignment(pipeline)
    found = dict(classic_orders(pipeline, owner, split=split))
    orders = next(orders for key, orders in found.items() if key.startswith(name))
    return plan_by_hand(pipeline, orders)


def _interleaved(problem: Problem) -> PlacedPipeline:
    """Four stages of about as many layers, in turn on two devices; the first one recomputes."""
    names, devices = list(problem.graph.layers), problem.cluster.device_names
    cuts = [len(names) * k // 4 for k in range(5)]
    specs = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        layers = tuple(names[start:end])
        specs.append(StageSpec(layers, (devices[number % 2],), layers if number == 0 else ()))
    return place(problem, specs)
