"""The models and plans that predictions are checked on, for ranks that share this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner import Cluster, Job, ModelSource, Plan, Problem, solve, trace
from planner.assembly import plan_by_hand
from planner.baselines import BASELINES
from planner.baselines.layers import Layers
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.interop.measured_costs import read_costs, with_costs, with_optimizer_costs
from planner.model.graph_record import graph_digest
from planner.model.layer_graph import LayerGraph
from planner.prediction import refresh
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import published_orders

MICROBATCHES = 4


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

    def traced(self) -> LayerGraph:
        """Trace the model at the size of its microbatches."""
        return trace(self.factory, self.job)

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


def problem_of(model: Model, graph: LayerGraph, cluster: Cluster, costs: Path | None) -> Problem:
    """A traced model on a cluster, with the times of its profile, if any."""
    job = model.job
    if costs is not None:
        file = read_costs(costs, f"the profile of {model.name}")
        graph = with_costs(graph, cluster, file)
        cluster = with_optimizer_costs(cluster, job, file)
    return Problem(graph, cluster, job, ModelSource(model.factory, dict(model.arguments)))


def plans_of(problem: Problem, *, time_limit_s: float) -> Iterator[tuple[str, Plan]]:
    """Five plans by name: ours, and four that exercise what ours may leave out."""
    yield "pipeplan", solve(problem, time_limit_s=time_limit_s).plan
    layers = Layers(StageTable(problem))
    even = place(problem, layers.specs(BASELINES["even"].plan(layers)))
    yield "even, 1F1B", _classic(even, "1f1b")
    yield "even, zero bubble", _classic(even, "zb-h1", split=True)
    yield "interleaved, recomputed", _classic(_interleaved(problem), "interleaved")
    yield "replicas", _classic(_replicated(problem), "1f1b")


def predicted_again(plan: Plan, problem: Problem) -> Plan:
    """The plan with the figures of another profile of the same model and machine."""
    record = problem.graph.record
    model = plan.model.model_copy(update={"graph": record, "graph_digest": graph_digest(record)})
    return refresh(plan.model_copy(update={"model": model, "cluster": problem.cluster}))


def _classic(pipeline: PlacedPipeline, name: str, *, split: bool = False) -> Plan:
    owner = balanced_assignment(pipeline)
    found = dict(published_orders(pipeline, owner, split=split))
    orders = next(orders for key, orders in found.items() if key.startswith(name))
    return plan_by_hand(pipeline, orders)


def _interleaved(problem: Problem) -> PlacedPipeline:
    """Two stages a device of about as many layers, in turn; the first one recomputes."""
    devices = problem.cluster.device_names
    specs = []
    for number, layers in enumerate(_cut(problem, 2 * len(devices))):
        device = devices[number % len(devices)]
        specs.append(StageSpec(layers, (device,), layers if number == 0 else ()))
    return place(problem, specs)


def _replicated(problem: Problem) -> PlacedPipeline:
    """Stages of two replicas each."""
    devices = problem.cluster.device_names
    cuts = _cut(problem, len(devices) // 2)
    rows = [devices[2 * number : 2 * number + 2] for number in range(len(cuts))]
    return place(problem, [StageSpec(*row) for row in zip(cuts, rows, strict=True)])


def _cut(problem: Problem, count: int) -> list[tuple[str, ...]]:
    """So many stages of about as many layers."""
    names = tuple(problem.graph.layers)
    cuts = [len(names) * k // count for k in range(count + 1)]
    return [names[start:end] for start, end in pairwise(cuts)]
