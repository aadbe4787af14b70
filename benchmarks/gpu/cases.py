"""The list of cases, in order of worth, and the plans that they run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models import ZOO
from planner.assembly import plan_by_hand
from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.interop.measured_costs import read_costs, with_costs, with_optimizer_costs
from planner.job import Job
from planner.plan.plan import Plan
from planner.plan.problem import ModelSource, Problem
from planner.schedules.best import best_schedule
from planner.schedules.split import split_backwards
from planner.sync.strategies import OPTIONS
from planner.tracing.factory import import_factory
from planner.tracing.trace import trace

EQUAL = {"loss_error": 1e-5, "gradient_error": 1e-5}
"""Bars of float32: relative errors of loss and gradients."""
ROUNDED = {"bfloat16_loss_over_plain": 2.0, "bfloat16_gradient_over_plain": 2.0}
"""Bars of bfloat16: the errors against float32 over those of plain torch in bfloat16."""
PREDICTED = {"one_stage_error": 0.1, "four_stages_error": 0.1}
ROOFLINE = {"roofline_error": 0.15}
LEAN = {"overhead": 0.03, "waits_per_microbatch": 0.0}
MEMORY = {"memory_error": 0.05}
_HOST = {"name": "host", "devices": 4, "type": "H200", "link": "NVLink4"}
NODE = Cluster.from_data({"format": "pipeplan-cluster/1", "name": "one", "nodes": [_HOST]})


@dataclass(frozen=True)
class Shape:
    """A plan before it is made.

    Attributes:
        model: A name of the zoo, or ``hf:ClassName``.
        stages: The ranks of each stage, a digit a rank: ``("0", "12")`` has two replicas of the
            last stage.
        samples: Samples of a microbatch.
        arguments, job: Arguments of the model, and further fields of the job.
        split: Whether backwards are split.
        recompute, offload: Whether every second layer is recomputed or offloaded.
    """

    model: str
    stages: tuple[str, ...] = ("0",)
    samples: int = 2
    arguments: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    split: bool = False
    recompute: bool = False
    offload: bool = False

    @property
    def factory(self) -> str:
        """The model's name as the planner takes it."""
        return ZOO.get(self.model, self.model)

    @property
    def checked_job(self) -> Job:
        """The job."""
        fields = {"optimizer": "sgd_momentum", "learning_rate": 0.01, "microbatches": 4}
        fields |= {"max_stages_per_device": 8, "offload": self.offload}
        fields |= {"model_arguments": dict(self.arguments), "samples_per_microbatch": self.samples}
        return Job.model_validate({**fields, **self.job})

    def placed(self, cluster: Cluster = NODE, costs: Path | None = None) -> PlacedPipeline:
        """Trace the model and place the stages.

        Args:
            cluster: Its devices are the ranks, in order.
            costs: File of measured costs; None: times come from the cluster's device types.
        """
        job = self.checked_job
        graph = trace(self.factory, job)
        if costs is not None:
            file = read_costs(costs, f"the profile of {self.model}")
            graph = with_costs(graph, cluster, file)
            cluster = with_optimizer_costs(cluster, job, file)
        layers, count = list(graph.layers), len(self.stages)
        specs = []
        for k, ranks in enumerate(self.stages):
            part = tuple(layers[len(layers) * k // count : len(layers) * (k + 1) // count])
            devices = tuple(cluster.device_names[int(rank)] for rank in ranks)
            again, away = (part[::2] if on else () for on in (self.recompute, self.offload))
            specs.append(StageSpec(part, devices, again, away))
        source = ModelSource(self.factory, job.model_arguments)
        return place(Problem(graph, cluster, job, source), specs)

    def plan(self, cluster: Cluster = NODE, costs: Path | None = None) -> Plan:
        """Make the plan with the best classic order; arguments as of :meth:`placed`."""
        pipeline = self.placed(cluster, costs)
        schedule = best_schedule(pipeline, backward="whole")
        assert schedule is not None
        arranged = split_backwards if self.split else list
        orders = {device: arranged(order) for device, order in schedule.orders.items()}
        return plan_by_hand(pipeline, orders)

    def in_bfloat16(self) -> Shape:
        """Return the same plan with weights of bfloat16."""
        return replace(self, job={**self.job, "precision": "bfloat16"})


@dataclass(frozen=True)
class Case:
    """One thing to try.

    Attributes:
        key: Its section and its name.
        probe: A function of :mod:`benchmarks.gpu.probes`.
        shape: The plan that the probe runs.
        bars: The largest value of a figure, by its name, on any device.
        gpu_bars: The same, of figures that mean something on a GPU only.
        options: Further arguments of the probe.
        limit_s: Seconds after which the case counts as hanging.
    """

    key: str
    probe: str
    shape: Shape
    bars: Mapping[str, float] = field(default_factory=dict)
    gpu_bars: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 90.0

    @property
    def ranks(self) -> int:
        """Number of processes that run it."""
        return len({rank for stage in self.shape.stages for rank in stage})

    @property
    def is_timed(self) -> bool:
        """Whether nothing else may run meanwhile."""
        return self.key.startswith(("prediction", "overhead"))

    def faults(self, row: Mapping[str, Any]) -> list[str]:
        """Return the error of a case that has ended, or the bars that it has missed, in words."""
        if "error" in row:
            return [str(row["error"])]
        bars = {**self.bars, **(self.gpu_bars if row["kind"] == "cuda" else {})}
        # A figure that is missing or not a number has not met its bar.
        return [
            f"{name} {row.get(name)} is above {bar:g}"
            for name, bar in bars.items()
            if not (isinstance(row.get(name), int | float) and abs(row[name]) <= bar)
        ]


TEXT = {"vocab_size": 128, "sequence_length": 16}
BLOCKS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**BLOCKS, **TEXT, "num_key_value_heads": 2, "intermediate_size": 48}
UNDRAWN_GPT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
UNDRAWN_BERT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
HUGGING_FACE: Mapping[str, Mapping[str, Any]] = {
    "hf:GPT2LMHeadModel": {"n_layer": 2, "n_embd": 32, "n_head": 4, **TEXT, **UNDRAWN_GPT},
    "hf:LlamaForCausalLM": LLAMA,
    "hf:Qwen2ForCausalLM": LLAMA,
    "hf:BertForMaskedLM": {**BLOCKS, **TEXT, "intermediate_size": 48, **UNDRAWN_BERT},
}
LLAMA_1B = {"vocab_size": 128256, "sequence_length": 2048, "num_hidden_layers": 16}
LLAMA_1B |= {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_1B |= {"intermediate_size": 8192, "tie_word_embeddings": True}
GPT = Shape("gpt_tiny")


def all_cases(*, short: bool) -> list[Case]:
    """Return the list; in its short form tiny models take the place of large ones."""
    return [*_models(), *_parity(), *_strategies(), *_predictions(short), *_overheads(short)]


def _models() -> Iterator[Case]:
    own = dict(HUGGING_FACE)
    for name in (name for name in ZOO if name.endswith("_tiny")):
        takes = inspect.signature(import_factory(ZOO[name])).parameters
        own[name] = {"dropout": 0.0} if "dropout" in takes else {}
    for name, arguments in own.items():
        yield Case(f"models: {name}", "model", Shape(name, arguments=arguments), EQUAL | ROUNDED)


def _parity() -> Iterator[Case]:
    yield Case("parity: collectives of one rank", "collectives", GPT)
    two = replace(GPT, stages=("0", "1"))
    drawn = Shape("bert_tiny", ("0", "1"), arguments={"dropout": 0.1})
    lengths = {"lengths": {"tokens": (4, 8), "shares": (0.5, 0.5)}}
    shapes = {
        "two stages": two,
        "split backwards": replace(two, split=True),
        "V": replace(GPT, stages=tuple("0110"), split=True),
        "dropout": drawn,
        "dropout, recomputed": replace(drawn, recompute=True),
        "offload": replace(two, offload=True),
        "lengths": Shape("llama_tiny", ("0", "1"), arguments={"sequence_length": 8}, job=lengths),
        "batch norm, replicas": Shape("resnet_tiny", ("01",)),
        "tied ends, replicas": replace(GPT, stages=("01", "2", "3"), split=True),
        "looped over four ranks": replace(GPT, stages=tuple("01230123")),
        "two pipelines": replace(GPT, stages=("01", "23")),
    }
    for name, shape in shapes.items():
        yield Case(f"parity: {name}", "against_plain", shape, EQUAL)


def _strategies() -> Iterator[Case]:
    for name in OPTIONS:
        exact = name in ("all_reduce", "fused", "decoupled")
        # Others train other weights, from the same first loss.
        bars = {"loss_error": EQUAL["loss_error"]} if exact else {"first_loss_error": 0.05}
        shape = replace(GPT, stages=("01",))
        yield Case(f"strategies: {name}", "strategy", shape, bars, options={"sync": name})


def _predictions(short: bool) -> Iterator[Case]:
    yield Case("prediction: detect", "detected", GPT)
    low = {"precision": "bfloat16", "microbatches": 8}
    llama = {"arguments": LLAMA if short else LLAMA_1B, "job": {} if short else low}
    shapes = (
        GPT if short else Shape("gpt2_small", samples=8, job=low),
        Shape("hf:LlamaForCausalLM", **llama),
        Shape("vit_tiny") if short else Shape("gpt2_medium", samples=4, job=low),
        Shape("resnet_tiny") if short else Shape("resnet50", samples=64, job=low),
    )
    options = {"seconds": 0.02 if short else 0.2, "steps": 2 if short else 10}
    for shape in shapes:
        bars = PREDICTED if "resnet" in shape.model else PREDICTED | ROOFLINE
        key = f"prediction: {shape.model}"
        yield Case(key, "predicted", shape, gpu_bars=bars, options=options, limit_s=150)


def _overheads(short: bool) -> Iterator[Case]:
    big = GPT if short else Shape("gpt2_small", samples=8, job={"microbatches": 8})
    options = {"autocast": "bfloat16", "steps": 2 if short else 10}
    yield Case("overhead: over plain torch", "overhead", big, gpu_bars=LEAN, options=options)
    yield Case("overhead: memory, float32", "memory", big, gpu_bars=MEMORY)
    yield Case("overhead: memory, bfloat16", "memory", big.in_bfloat16(), gpu_bars=MEMORY)
