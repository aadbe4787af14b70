"""Layouts that others have published, beside our plans for the same machines and batch.

Devices have twice their memory: what was published does not tell all that fills it, such as 8-bit
formats and fused operators, so that it is no limit for either side. Nothing is recomputed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, Row, counted
from benchmarks.rivals.machines import Machines, Node
from planner import Job, LayerGraph, PipeplanError, Plan, Problem, adopt, solve, verify
from planner.tracing.sharding.record import with_splits
from planner.tracing.trace import trace_step
from planner.variants.problems import with_memory

WITHIN, FASTER = 1.02, 1.03
"""A plan is good enough if it is that near to its bound, or so many times as fast as theirs."""
LLAMA_70B = {
    **{"sequence_length": 8192, "vocabulary": 128256, "layers": 80, "width": 8192},
    **{"heads": 64, "kv_heads": 8, "ffn": 28672},
}
LLAMA_12 = {"sequence_length": 2048, "vocabulary": 128256, "layers": 12}


@dataclass(frozen=True)
class Setting:
    """A model on machines, and the layout of stages that somebody runs there.

    Attributes:
        name: of model and machines.
        source: who published the layout.
        machines: the cluster.
        model: arguments of the zoo's Llama.
        job: fields of the job.
        layout: in Megatron-LM's notation, an interleaved 1F1B where ranks hold several stages.
        ranks: of a pipeline.
    """

    name: str
    source: str
    machines: Machines
    model: Mapping[str, int]
    job: Mapping[str, object]
    layout: str
    ranks: int

    def problem(self) -> Problem:
        """Return the problem, whose model is traced."""
        job = Job(model_arguments=dict(self.model), recompute=False, **self.job)
        step = trace_step("models.llama:llama_tiny", job)
        degree = job.tensor_parallel
        splits = [degree] if isinstance(degree, int) and degree > 1 else []
        graph = LayerGraph.from_record(with_splits(step, splits, sequence=job.sequence_parallel))
        problem, kind = Problem(graph, self.machines.cluster, job), self.machines.nodes[0].type
        twice_gib = 2 * problem.cluster.device_types[kind].memory_gib
        return with_memory(problem, {kind: twice_gib})

    def theirs(self, problem: Problem) -> Plan:
        """Return the plan of the layout on all devices."""
        degree = problem.job.tensor_parallel
        assert degree != "any"
        replicas = len(problem.cluster.devices) // (self.ranks * degree)
        return adopt(problem, self.layout, pipeline_size=self.ranks, replicas=replicas)


def _four_3090(width: int, heads: int, ffn: int) -> Setting:
    return Setting(
        f"Llama 3, 12 layers of width {width}, 4 RTX-3090",
        "torchtitan's default split, beside which PR 2113 has its automatic one",
        Machines("4 RTX-3090", (Node(4, "RTX-3090", "PCIe4-x16", "Ethernet-100G"),)),
        {**LLAMA_12, "width": width, "heads": heads, "kv_heads": 8, "ffn": ffn},
        {"microbatches": 8, "precision": "bfloat16", "backward": "whole", "replication": False},
        "Ettt|tttt|ttt|ttL",
        4,
    )


SETTINGS = (
    _four_3090(2048, 16, 8192),
    _four_3090(4096, 32, 14336),
    Setting(
        "Llama 3 70B, 64 H100",
        "NVIDIA's layout of Megatron-Bridge (PR 5391), there in FP8",
        Machines("64 H100", (Node(8, "H100-80GB", "NVLink4", "InfiniBand-NDR"),) * 8),
        LLAMA_70B,
        {
            **{"microbatches": 128, "precision": "bfloat16", "backward": "whole"},
            **{"tensor_parallel": 4, "sequence_parallel": True, "shard_optimizer": True},
            **{"max_stages_per_device": 5, "equal_pipelines": True},
        },
        "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL",
        8,
    ),
)


def section(options: argparse.Namespace) -> Result:
    """Published layouts."""
    return judged([_row(setting, options.seconds) for setting in SETTINGS])


def judged(rows: Sequence[Row]) -> Result:
    """Return rows with the claim that each of our plans is near its bound, or clearly faster."""
    fine = [
        row["theirs / ours"] >= FASTER or row["ours, s"] <= WITHIN * row["bound, s"] for row in rows
    ]
    return Result(rows, [counted("plans within 2 % of the bound, or 3 % faster", fine)])


def _row(setting: Setting, seconds: float) -> Row:
    """Return a row of the table.

    Raises:
        PipeplanError: if our plan is not valid.
    """
    problem = setting.problem()
    theirs = setting.theirs(problem)
    ours = solve(problem, time_limit_s=seconds)
    if wrong := verify(ours.plan):
        raise PipeplanError(wrong)
    their_s = theirs.predicted.iteration_time_s
    return {
        "setting": setting.name,
        "source": setting.source,
        "layout": setting.layout,
        "theirs, s": their_s,
        "ours, s": ours.iteration_time_s,
        "theirs / ours": their_s / ours.iteration_time_s,
        "bound, s": ours.lower_bound_s,
        "our stages": [f"{len(s.layers)} x {len(s.devices)}" for s in ours.plan.stages],
    }
