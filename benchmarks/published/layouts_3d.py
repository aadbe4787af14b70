"""Published layouts of data, tensor and pipeline parallelism, predicted from sizes alone.

Nobody published times of their layers. They follow from the cost model: FLOPs and traffic of each
block (:mod:`benchmarks.published.megatron_gpt`), the shape of its products, collectives inside the
tensor-parallel group, messages, and reductions among the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.published.megatron_gpt import PRECISION, Gpt
from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType, TileShape
from planner.cluster.presets import DEVICES, LINKS
from planner.cluster.tensor_groups import TensorGroup, grouped
from planner.costs.placement import PlacedPipeline, StageSpec, place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RULES, RuntimeRules
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import WHOLE
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

GPUS_PER_NODE = 8
GPU = "A100-80GB"
TILES = TileShape(rows=256, columns=128, at_once=108)
"""NVIDIA, "Matrix Multiplication Background User's Guide": the tiles of cuBLAS on an A100, one on
each of its 108 multiprocessors at a time."""
NVLINK_GB_PER_S = 235.0
"""Bandwidth of an edge of a ring on NVLink 3 that NCCL reaches, of 300 (nccl-tests, DGX A100)."""
OF_NETWORK = 0.8
"""Share of a network card's bandwidth that NCCL reaches."""
STEPS, CLOSE = 5, 1e-3
"""Of the secant: most steps, and the relative change at which it ends."""


@dataclass(frozen=True)
class Machine:
    """A cluster of nodes of 8 A100 and the software on it.

    Attributes:
        name: of both.
        node_gb_per_s: of all network cards of a node.
        runtime: rules by which a plan runs.
        reserved_gib: of each GPU before the model, for driver, NCCL and the runtime's buffers.
        zero: whether the optimizer's state is shared by replicas (ZeRO-1).
    """

    name: str
    node_gb_per_s: float
    runtime: RuntimeRules
    reserved_gib: float = 4.0
    zero: bool = False

    def device(self, efficiency: float | None) -> DeviceType:
        """Return a GPU, with the preset's efficiency of matrix products or another one."""
        found = DEVICES[GPU].model_copy(update={"tiles": TILES, "reserved_gib": self.reserved_gib})
        if efficiency is None:
            return found
        reached = found.by_class["product"].model_copy(update={"efficiency": efficiency})
        return found.model_copy(update={"by_class": {**found.by_class, "product": reached}})

    def cluster(self, gpus: int, efficiency: float | None) -> Cluster:
        """Return single GPUs; each has its share of its node's network cards.

        All tensor ranks of a node send at once, so that none has more.
        """
        names = [f"n{index // GPUS_PER_NODE}/g{index % GPUS_PER_NODE}" for index in range(gpus)]
        inner = {"bandwidth_gb_per_s": NVLINK_GB_PER_S, "latency_us": LINKS["NVLink3"].latency_us}
        outer = {
            "bandwidth_gb_per_s": OF_NETWORK * self.node_gb_per_s / GPUS_PER_NODE,
            "latency_us": LINKS["InfiniBand-HDR"].latency_us,
        }
        nodes = list(dict.fromkeys(name.split("/")[0] for name in names))
        links: list[dict[str, Any]] = []
        for name in names:
            links.append({"between": [name, name.split("/")[0]], **inner})
            links.append({"between": [name, "network"], **outer})
        return Cluster.parse(
            {
                "format": "pipeplan-cluster/1",
                "name": self.name,
                "device_types": {GPU: self.device(efficiency).model_dump()},
                "devices": [{"name": name, "type": GPU} for name in names],
                "switches": ["network", *nodes],
                "links": links,
            },
            self.name,
        )


@dataclass(frozen=True)
class Layout:
    """A published run.

    Attributes:
        machine: that ran it.
        source: the publication.
        gpt: sizes, samples of a microbatch and tensor degree.
        replicas, stages, chunks: data and pipeline parallelism; stages of a device.
        batch: samples of an iteration.
        measured_s: seconds of one; None: out of memory.
        measured_gb: memory of a GPU; None: not published.
    """

    machine: Machine
    source: str
    gpt: Gpt
    replicas: int
    stages: int
    batch: int
    measured_s: float | None
    measured_gb: float | None = None
    chunks: int = 1

    @property
    def name(self) -> str:
        """DP/TP/PP/microbatch, and what else tells it from others."""
        sizes = f"{self.replicas}/{self.gpt.degree}/{self.stages}/{self.gpt.samples}"
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        gpt = f"{self.gpt.blocks} x {self.gpt.hidden}, {self.gpt.heads} heads"
        return f"{gpt}, batch {self.batch}, {sizes}{chunks}"

    @cached_property
    def gpus(self) -> int:
        """Their number."""
        return self.replicas * self.stages * self.gpt.degree

    def predicted_s(self, efficiency: float | None = None) -> float:
        """Return the seconds of an iteration, each tensor sent once."""
        return self._timeline(efficiency, in_parts=True).iteration_time_s

    def predicted_gb(self) -> float:
        """Return the memory of the fullest GPU, in 10^9 bytes, each tensor whole on every device.

        The cost model's optimizer state is that of a device without ZeRO; here replicas share it.
        """
        timeline = self._timeline(None, in_parts=False)
        device, peak = max(timeline.peak_memory_bytes.items(), key=lambda row: row[1])
        pipeline, job = timeline.pipeline, timeline.pipeline.problem.job
        layers = [
            n for stage in pipeline.stages_on[device] for n in pipeline.stages[stage].spec.layers
        ]
        elements = sum(row.elements for row in pipeline.problem.graph.parameters_of(layers))
        if self.machine.zero:
            state = job.optimizer_bytes_per_element * elements
            peak -= state - state // self.replicas
        return (peak / self.gpt.degree + self.machine.reserved_gib * 2**30) / 1e9

    @property
    def memory_gb(self) -> float:
        """The memory of a GPU, in 10^9 bytes."""
        return DEVICES[GPU].memory_gib * 2**30 / 1e9

    # --- the plan ---------------------------------------------------------------------------------

    def _timeline(self, efficiency: float | None, *, in_parts: bool) -> Timeline:
        """Replay one of the replicas, whose gradients are reduced among all."""
        graph = self.gpt.graph(in_parts=in_parts)
        problem = Problem(graph, self._cluster(efficiency), self._job(), self.machine.runtime)
        pipeline = self._placed(problem, self._division(graph))
        schedule = "interleaved 1f1b" if self.chunks > 1 else "1f1b"
        return simulate(pipeline, WHOLE[schedule](pipeline, balanced_assignment(pipeline)))

    def _cluster(self, efficiency: float | None) -> Cluster:
        single = self.machine.cluster(self.gpus, efficiency)
        if self.gpt.degree == 1:
            return single
        size = self.gpt.degree
        names = single.device_names
        groups = (names[i : i + size] for i in range(0, len(names), size))
        return grouped(
            single,
            [TensorGroup(name=f"t{i}", devices=tuple(row)) for i, row in enumerate(groups)],
        )

    def _job(self) -> Job:
        return Job(
            name="gpt",
            samples_per_microbatch=self.gpt.samples,
            microbatches=self.batch // self.gpt.samples,
            precision=PRECISION,
            backward="whole",
            overlap_reduction=False,
            max_stages_per_device=self.chunks,
        )

    def _division(self, graph: LayerGraph) -> list[tuple[str, ...]]:
        """Return the layers of each stage: blocks evenly, of a rest one more on the first ones."""
        first, *blocks, last = graph.layers
        count = self.stages * self.chunks
        each, rest = divmod(len(blocks), count)
        left, found = iter(blocks), []
        for stage in range(count):
            found.append(tuple(next(left) for _ in range(each + (stage < rest))))
        found[0] = (first, *found[0])
        found[-1] = (*found[-1], last)
        return found

    def _placed(self, problem: Problem, stages: Sequence[tuple[str, ...]]) -> PlacedPipeline:
        names, count = problem.cluster.device_names, self.replicas
        rank = [names[index * count] for index in range(self.stages)]
        specs = [
            StageSpec(layers, (rank[index % self.stages],), layers)
            for index, layers in enumerate(stages)
        ]
        specs[0] = replace(specs[0], recompute=specs[0].layers[1:])
        specs[-1] = replace(specs[-1], recompute=specs[-1].recompute[:-1])
        groups = [
            {device: names[index * count + number] for index, device in enumerate(rank)}
            for number in range(count)
        ]
        return place(problem, specs, groups=groups if count > 1 else ())


# --- the publications -----------------------------------------------------------------------------

PREQUEL = (
    "BigScience 2022, github.com/bigscience-workshop/bigscience, "
    "train/tr11-176B-ml/chronicles-prequel.md: Megatron-DeepSpeed on 384 A100 (48 nodes)"
)
NARAYANAN = (
    "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using "
    "Megatron-LM (SC), table 1; seconds from its equation 3, microbatches and chunks from the "
    "authors' scripts"
)
KORTHIKANTI = (
    "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, "
    "table 5, full recomputation"
)
JEAN_ZAY = Machine(
    "48 nodes with 4 x 100 Gb/s Omni-Path, Megatron-DeepSpeed with ZeRO-1",
    50.0,
    RULES["deepspeed"],
    zero=True,
)
SELENE = Machine("nodes with 8 x 200 Gb/s InfiniBand, Megatron-LM", 200.0, RULES["megatron"])

# Blocks, hidden, heads, DP, TP, PP, microbatch, batch, GB, seconds (None: out of memory). Of 25 and
# 26 February; before, the machine was set up otherwise.
_PREQUEL: tuple[tuple[int, int, int, int, int, int, int, int, float | None, float | None], ...] = (
    (72, 14336, 64, 8, 8, 6, 4, 2048, 55, 114.11),
    (72, 14336, 64, 8, 8, 6, 4, 1568, 56, 113.01),
    (72, 14336, 64, 4, 8, 12, 4, 1568, None, 92.75),
    (72, 14336, 64, 4, 8, 12, 4, 2048, 49, 117.07),
    (72, 14336, 64, 4, 8, 12, 2, 1568, None, 99.93),
    (72, 14336, 64, 4, 8, 12, 2, 2048, None, 128.82),
    (72, 14336, 64, 6, 8, 8, 4, 2016, 52, 113.16),
    (72, 14336, 64, 12, 8, 4, 2, 2016, 53, 125.52),
    (72, 14336, 64, 12, 8, 4, 4, 2016, 59, 114.81),
    (72, 14336, 64, 24, 8, 2, 1, 2016, 65, 145.45),
    (72, 14336, 64, 24, 8, 2, 2, 2016, 76, 136.13),
    (72, 14336, 64, 48, 8, 1, 1, 2016, None, None),
    (72, 14336, 64, 8, 4, 12, 4, 2048, 60, 111.89),
    (72, 14336, 64, 8, 4, 12, 2, 2048, 44, 110.48),
    (72, 14336, 64, 16, 4, 6, 4, 2048, 75, 117.11),
    (72, 14336, 64, 16, 4, 6, 2, 2048, 57, 111.71),
    (72, 14336, 64, 16, 2, 12, 2, 2048, 63, 112.50),
    (72, 14336, 64, 32, 2, 6, 2, 2048, None, None),
    (72, 14336, 64, 32, 2, 6, 1, 2048, None, None),
    (72, 14336, 64, 8, 2, 24, 1, 2048, 44, 119.53),
    (72, 14336, 64, 8, 2, 24, 2, 2048, 53, 122.75),
    (72, 14336, 64, 4, 4, 24, 1, 2048, None, 130.60),
    (96, 12288, 64, 8, 1, 48, 1, 2048, 58, 142.17),
    (84, 13312, 64, 8, 4, 12, 2, 2048, None, 103.82),
    (84, 13312, 64, 8, 4, 12, 4, 2048, None, 113.21),
)

# Blocks, hidden, heads, TP, PP, GPUs, batch, microbatch, chunks, teraFLOP/s a GPU.
_NARAYANAN = (
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    (30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
    (36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163),
)

# Blocks, hidden, heads, TP, PP, batch, microbatch, chunks, seconds.
_KORTHIKANTI = (
    (48, 6144, 64, 8, 1, 4, 4, 1, 1.42),
    (96, 12288, 96, 8, 8, 64, 1, 3, 18.13),
    (105, 20480, 128, 8, 35, 280, 1, 3, 49.05),
    (128, 25600, 160, 8, 64, 512, 1, 1, 94.42),
)
SEQUENCE, PREQUEL_VOCABULARY, MEGATRON_VOCABULARY = 2048, 250_880, 51_200


def layouts() -> Iterator[Layout]:
    """Yield all rows, of each source the one that calibrates first."""
    for blocks, hidden, heads, dp, tp, pp, samples, batch, gb, seconds in _PREQUEL:
        gpt = Gpt(blocks, hidden, heads, SEQUENCE, PREQUEL_VOCABULARY, samples, tp)
        batch -= batch % (dp * samples)
        yield Layout(JEAN_ZAY, PREQUEL, gpt, dp, pp, batch, seconds, gb)
    for blocks, hidden, heads, tp, pp, gpus, batch, samples, chunks, rate in _NARAYANAN:
        gpt = Gpt(blocks, hidden, heads, SEQUENCE, MEGATRON_VOCABULARY, samples, tp)
        seconds = batch * iteration_flops(gpt) / (gpus * rate * 1e12)
        yield Layout(SELENE, NARAYANAN, gpt, gpus // tp // pp, pp, batch, seconds, chunks=chunks)
    for blocks, hidden, heads, tp, pp, batch, samples, chunks, seconds in _KORTHIKANTI:
        gpt = Gpt(blocks, hidden, heads, SEQUENCE, MEGATRON_VOCABULARY, samples, tp)
        yield Layout(SELENE, KORTHIKANTI, gpt, 1, pp, batch, seconds, chunks=chunks)


def iteration_flops(gpt: Gpt) -> float:
    """Return the FLOPs of a sample with recomputation: Narayanan et al. 2021, equation 3."""
    hidden, sequence, blocks = gpt.hidden, gpt.sequence, gpt.blocks
    head = gpt.vocabulary / (16 * blocks * hidden)
    return 96 * sequence * blocks * hidden**2 * (1 + sequence / (6 * hidden) + head)


def efficiency_of(layout: Layout) -> float:
    """Return the efficiency of matrix products at which a row is predicted as measured.

    Time is all but linear in its inverse, so that few steps of the secant find it.
    """
    assert layout.measured_s is not None
    before, after = 1 / 0.8, 1 / 0.6
    before_s, after_s = (layout.predicted_s(1 / x) for x in (before, after))
    for _ in range(STEPS):
        slope = (after_s - before_s) / (after - before)
        before, before_s = after, after_s
        after = max(1.0, after + (layout.measured_s - after_s) / slope)
        if abs(after / before - 1) < CLOSE:
            break
        after_s = layout.predicted_s(1 / after)
    return 1 / after
