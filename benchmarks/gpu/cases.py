"""What is tried: trainings by a plan, and probes of one device, the most valuable first."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.search.schedule.classics import split_backwards
from planner.search.schedule.heuristic import best_heuristic_schedule
from planner.sync.strategies import OPTIONS
from planner.tracing.factory import import_factory
from planner.tracing.trace import trace

TINY = tuple(name for name in ZOO if name.endswith("_tiny"))


@dataclass(frozen=True)
class Shape:
    """A plan before it is made.

    Attributes:
        model: of the zoo.
        stages: the ranks of each, as a digit a rank: ``("0", "12")`` has two replicas of the last.
        microbatches: of an iteration.
        samples: of a microbatch.
        precision: of the weights.
        arguments: of the model.
        split: whether backwards are split.
        recompute: whether every second layer is.
    """

    model: str
    stages: tuple[str, ...]
    microbatches: int = 4
    samples: int = 2
    precision: str = "float32"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    split: bool = False
    recompute: bool = False

    @property
    def ranks(self) -> int:
        """How many processes run it."""
        return len({rank for stage in self.stages for rank in stage})

    def alone(self) -> Shape:
        """The same training by one rank in one stage."""
        kept = {name: getattr(self, name) for name in ("samples", "precision", "arguments")}
        return Shape(self.model, ("0",), self.microbatches, **kept)

    def plan(self) -> Plan:
        """Trace the model and make the plan."""
        job = Job(
            samples_per_microbatch=self.samples,
            microbatches=self.microbatches,
            precision=self.precision,
            optimizer="adamw",
            learning_rate=1e-3,
            max_stages_per_device=8,
            model_arguments=dict(self.arguments),
        )
        graph = _traced(self.model, self.samples, self.precision, json.dumps(dict(self.arguments)))
        source = ModelSource(ZOO[self.model], dict(self.arguments))
        problem = Problem(graph, _star(self.ranks), job, source)
        layers, count = list(graph.layers), len(self.stages)
        cuts = [round(k * len(layers) / count) for k in range(count + 1)]
        specs = []
        for k, ranks in enumerate(self.stages):
            part = tuple(layers[cuts[k] : cuts[k + 1]])
            again = part[::2] if self.recompute else ()
            specs.append(StageSpec(part, tuple(f"d{rank}" for rank in ranks), again))
        pipeline = place(problem, specs)
        schedule = best_heuristic_schedule(pipeline)
        assert schedule is not None
        arranged = split_backwards if self.split else list
        orders = {device: arranged(order) for device, order in schedule.orders.items()}
        return plan_by_hand(pipeline, orders)


@cache
def _traced(model: str, samples: int, precision: str, arguments: str) -> LayerGraph:
    job = {"samples_per_microbatch": samples, "precision": precision}
    job["model_arguments"] = json.loads(arguments)
    return trace(ZOO[model], Job.model_validate(job))


def _star(ranks: int) -> Cluster:
    devices = [f"d{rank}" for rank in range(ranks)]
    kind = {
        "memory_gib": 4096,
        "memory_bandwidth_gb_per_s": 2000,
        "peak_tflop_per_s": {"float32": 50, "bfloat16": 400, "float16": 400},
    }
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "one-host",
            "device_types": {"gpu": kind},
            "devices": [{"name": name, "type": "gpu"} for name in devices],
            "switches": ["bus"],
            "links": [{"between": [name, "bus"], "bandwidth_gb_per_s": 25} for name in devices],
        }
    )


@dataclass(frozen=True)
class Case:
    """Something to try.

    Attributes:
        section: of the report.
        name: within the section, in words.
        shape: of the plan; None of a probe that needs none.
        probe: a function of :mod:`benchmarks.gpu.probes`; None of a training.
        steps: of a training.
        on_cpu: whether it runs on the CPU whatever there is.
        settings: of the training file.
        options: of :class:`~executor.launch.run.RunSettings`.
        reference: name of the case, of the same section, that has the right losses.
        limit_s: after which it counts as hanging.
    """

    section: str
    name: str
    shape: Shape | None = None
    probe: str | None = None
    steps: int = 3
    on_cpu: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reference: str | None = None
    limit_s: float = 90.0

    @property
    def ranks(self) -> int:
        """How many processes run it."""
        return 1 if self.shape is None else self.shape.ranks

    @property
    def key(self) -> str:
        """The name that no other case has."""
        return f"{self.section}: {self.name}"


def one_gpu(short: bool) -> Iterator[Case]:
    """Yield what one GPU can show; several ranks share it over gloo."""
    yield Case("environment", "versions and devices", probe="environment")
    yield from _models(("gpt_tiny",) if short else TINY, short)
    yield from _parity(
        {"two stages": Shape("gpt_tiny", ("0", "1"))} if short else dict(_shapes(4)), "parity"
    )
    yield from _strategies(short)
    model = "gpt_tiny" if short else "gpt2_small"
    alone = Shape(model, ("0",), microbatches=2 if short else 8)
    yield Case("waits", "host waits in an iteration", alone, probe="waits")
    yield Case("profile", "launches and gaps in an iteration", alone, probe="profile")
    yield Case("transport", "copies between host and device", probe="copies")
    yield from _memory(model, short)
    yield Case("checkpoint", "from the CPU to the device and back", alone, probe="checkpoint")


def several_gpus(short: bool, gpus: int) -> Iterator[Case]:
    """Yield what takes a GPU for each rank, over NCCL."""
    hangs = {"looped over three ranks": ("0", "1", "2", "0", "1", "2")}
    if gpus >= 4:
        hangs["looped over four ranks"] = tuple("01230123")
        hangs["ends replicated"] = ("01", "2", "3", "01")
    for name, stages in hangs.items():
        for count in (1, 2, 3, 7):
            if max(map(int, "".join(stages))) < gpus:
                shape = Shape("gpt_tiny", stages, count)
                yield Case("hangs", f"{name}, {count} microbatches", shape, limit_s=60)
    two = Shape("gpt_tiny", ("0", "1"))
    for backend in ("nccl", "gloo"):
        options = {"backend": backend}
        yield Case("backends", f"--backend {backend}, with a timeline", two, options=options,
                   settings={"timeline": "timeline.json"})  # fmt: skip
    yield from _parity(dict(_shapes(gpus)), "parity of several GPUs")
    every = Shape("gpt_tiny", ("0123456789"[:gpus],), gpus)
    yield Case("links", "between all ranks", every, probe="links", limit_s=240)
    spread = Shape("gpt2_small", tuple(map(str, range(gpus))), 4 * gpus, 4, "bfloat16")
    yield Case("long", "1,000 steps of GPT-2 small", spread, steps=1000, limit_s=600)
    replicas = Shape("gpt2_small", every.stages, 2 * gpus, 4)
    for mib in (1, 25, 100):
        options = {"sync": f"all_reduce:bucket_mib={mib}"}
        yield Case("buckets", f"{mib} MiB", replicas, steps=6, options=options, limit_s=180)


def _models(names: Sequence[str], short: bool) -> Iterator[Case]:
    """Every model by one rank, against the CPU."""
    for precision in ("float32",) if short else ("float32", "bfloat16"):
        for name in names:
            signature = inspect.signature(import_factory(ZOO[name])).parameters
            arguments = {"dropout": 0.0} if "dropout" in signature else {}
            shape = Shape(name, ("0",), 2, precision=precision, arguments=arguments)
            cpu, section = f"{name}, {precision}, on the CPU", "models"
            yield Case(section, cpu, shape, on_cpu=True)
            yield Case(section, f"{name}, {precision}", shape, reference=cpu)


def _shapes(ranks: int) -> Iterator[tuple[str, Shape]]:
    """Yield plans of everything that may go wrong, of at most so many ranks."""
    dropout = {"dropout": 0.1}
    yield "two stages", Shape("gpt_tiny", ("0", "1"))
    yield "split backwards", Shape("gpt_tiny", ("0", "1"), split=True)
    yield "dropout across stages", Shape("bert_tiny", ("0", "1"), arguments=dropout)
    yield "dropout, recomputed", Shape("bert_tiny", ("0", "1"), arguments=dropout, recompute=True)
    yield "batch norm, replicas", Shape("resnet_tiny", ("01",))
    yield "two stages a rank", Shape("gpt_tiny", ("0", "1", "0", "1"))
    yield "V", Shape("gpt_tiny", ("0", "1", "1", "0"))
    if ranks >= 4:
        yield "four stages", Shape("gpt_tiny", ("0", "1", "2", "3"))
        yield "tied ends in replicas", Shape("gpt_tiny", ("01", "2", "3"), split=True)
        yield "two pipelines", Shape("gpt_tiny", ("01", "23"))


def _parity(shapes: Mapping[str, Shape], section: str) -> Iterator[Case]:
    done = set()
    for name, shape in shapes.items():
        alone = shape.alone()
        whole = f"one rank: {alone.model} {dict(alone.arguments) or ''}".strip()
        if whole not in done:
            done.add(whole)
            yield Case(section, whole, alone)
        yield Case(section, name, shape, reference=whole)


def _strategies(short: bool) -> Iterator[Case]:
    """Every strategy of synchronisation on two replicas; not all have one process's losses."""
    shape = Shape("gpt_tiny", ("01",))
    yield Case("strategies", "one rank", shape.alone())
    for name in ("all_reduce",) if short else OPTIONS:
        yield Case("strategies", name, shape, steps=3, options={"sync": name}, reference="one rank")


def _memory(model: str, short: bool) -> Iterator[Case]:
    shape = Shape(model, ("0",), 2 if short else 4)
    yield Case("memory", f"{model}, float32", shape)
    yield Case("memory", f"{model}, autocast", shape, settings={"autocast": "bfloat16"})
    if not short:
        low = Shape(model, ("0",), 4, precision="bfloat16")
        yield Case("memory", f"{model}, bfloat16 with masters", low)


def all_cases(short: bool, gpus: int) -> list[Case]:
    """Return everything that a machine can show, the most valuable first."""
    several = several_gpus(short, gpus) if gpus >= 2 else ()
    return [*several, *one_gpu(short)]
