"""Published layouts of data, tensor and pipeline parallelism, predicted from sizes alone.

Nobody published times of their layers. They follow from the cost model: FLOPs and traffic of each
block (:mod:`benchmarks.published.megatron_gpt`), the shape of its products, collectives inside the
tensor-parallel group, messages, and reductions among the replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from benchmarks.published.megatron_gpt import ELEMENT, PRECISION, Gpt
from planner.cluster.cluster import Cluster
from planner.cluster.hardware import DeviceType, TileShape
from planner.cluster.presets import DEVICES, LINKS, OVERHEAD_US
from planner.cluster.tensor_groups import TensorGroup, grouped
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RuntimeRules
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import WHOLE
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

GPUS_PER_NODE = 8
GPU = "A100-80GB"
TILES = TileShape(rows=256, columns=128, at_once=108)
"""NVIDIA, "Matrix Multiplication Background User's Guide": the tiles of cuBLAS on an A100, one on
each of its 108 multiprocessors at a time."""
FILLED = 271.2 / 312
"""Efficiency of products whose tiles fill whole waves: of the best one found on an A100 SXM
(Bekman, Machine Learning Engineering, Maximum Achievable Matmul FLOPS). The preset's is that of
products as models have them, waves half empty included."""
NVLINK_GB_PER_S = 235.0
"""Bandwidth of an edge of a ring on NVLink 3 that NCCL reaches, of 300 (nccl-tests, DGX A100)."""
BUCKET = 5 * 10**8
"""Elements of a bucket of DeepSpeed, by default."""


@dataclass(frozen=True)
class Figures:
    """The figures of a machine that a run of it may calibrate.

    Attributes:
        efficiency: of products whose tiles fill whole waves.
        host_us: of every operation that it launches.
    """

    efficiency: float = FILLED
    host_us: float = OVERHEAD_US


@dataclass(frozen=True)
class Machine:
    """A cluster of nodes of 8 A100 and the software on it.

    Attributes:
        name: of both.
        node_gb_per_s: that NCCL reaches over all network cards of a node.
        runtime: rules by which a plan runs.
        reserved_gib: of each GPU before the model, for driver, NCCL and the runtime's buffers.
        zero: whether the optimizer's state is shared by replicas (ZeRO-1).
        figures: if nothing is calibrated.
        fills: whether stages are filled one after the other, the last has what is left; else they
            have equally many blocks.
    """

    name: str
    node_gb_per_s: float
    runtime: RuntimeRules
    reserved_gib: float = 4.0
    zero: bool = False
    figures: Figures = Figures()
    fills: bool = False

    def device(self, figures: Figures) -> DeviceType:
        """Return a GPU: the preset with the tiles of its products and other figures of these."""
        preset = DEVICES[GPU]
        reached = preset.by_class["product"].model_copy(update={"efficiency": figures.efficiency})
        return preset.model_copy(
            update={
                "tiles": TILES,
                "reserved_gib": self.reserved_gib,
                "operation_overhead_us": figures.host_us,
                "by_class": {**preset.by_class, "product": reached},
            }
        )

    def cluster(self, gpus: int, figures: Figures, rings: Sequence[Sequence[int]] = ()) -> Cluster:
        """Return single GPUs; each has its share of its node's network cards.

        All tensor ranks of a node send at once, so that none has more. A ring with several GPUs on
        a node has the cards of all of them, as if NCCL divided its bytes among as many rings, each
        of which leaves the node over another card. That is an assumption, made with published rows
        in view whose groups are smaller than nodes. Its neighbours on two nodes have a link of that
        bandwidth, which no message between stages takes.

        Args:
            gpus: their number.
            figures: of each.
            rings: the GPUs of each ring of replicas, in order.
        """
        names = [f"n{index // GPUS_PER_NODE}/g{index % GPUS_PER_NODE}" for index in range(gpus)]
        inner = {"bandwidth_gb_per_s": NVLINK_GB_PER_S, "latency_us": LINKS["NVLink3"].latency_us}
        outer = {
            "bandwidth_gb_per_s": self.node_gb_per_s / GPUS_PER_NODE,
            "latency_us": LINKS["InfiniBand-HDR"].latency_us,
        }
        nodes = list(dict.fromkeys(name.split("/")[0] for name in names))
        links: list[dict[str, Any]] = []
        for name in names:
            links.append({"between": [name, name.split("/")[0]], **inner})
            links.append({"between": [name, "network"], **outer})
        for ring in rings:
            cards = max(Counter(gpu // GPUS_PER_NODE for gpu in ring).values())
            width = {"bandwidth_gb_per_s": cards * outer["bandwidth_gb_per_s"]}
            path = {**width, "latency_us": 2 * outer["latency_us"]}
            edges = {frozenset(edge) for edge in pairwise([*ring, ring[0]])}
            for first, second in sorted(map(sorted, edges)):
                if cards > 1 and first // GPUS_PER_NODE != second // GPUS_PER_NODE:
                    links.append({"between": [names[first], names[second]], **path})
        return Cluster.parse(
            {
                "format": "pipeplan-cluster/1",
                "name": self.name,
                "device_types": {GPU: self.device(figures).model_dump()},
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
        measured_s: seconds of one; None: not known, or out of memory.
        measured_gb: memory of a GPU; None: not known.
        out_of_memory: whether it was.
        calibrates: whether it may calibrate the figures of its machine.
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
    out_of_memory: bool = False
    calibrates: bool = False

    @property
    def name(self) -> str:
        """DP/TP/PP/microbatch, and what else tells it from others."""
        sizes = f"{self.replicas}/{self.gpt.degree}/{self.stages}/{self.gpt.samples}"
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        gpt = f"{self.gpt.blocks} x {self.gpt.hidden}, {self.gpt.heads} heads"
        selective = ", selective" if self.gpt.selective else ""
        return f"{gpt}, batch {self.batch}, {sizes}{chunks}{selective}"

    @cached_property
    def gpus(self) -> int:
        """Their number."""
        return self.replicas * self.stages * self.gpt.degree

    def predicted_s(self, figures: Figures | None = None) -> float:
        """Return the seconds of an iteration."""
        if figures is None:
            return self._as_it_is.iteration_time_s
        return self._timeline(figures).iteration_time_s

    def predicted_gb(self) -> float:
        """Return the memory of the fullest GPU, in 10^9 bytes."""
        peaks, pipeline = self._as_it_is.peak_memory_bytes, self._as_it_is.pipeline
        held = []
        for device, peak in peaks.items():
            stages = [pipeline.stages[stage] for stage in pipeline.stages_on[device]]
            layers = [layer for stage in stages for layer in stage.spec.layers]
            elements = sum(p.elements for p in pipeline.problem.graph.parameters_of(layers))
            held.append((peak + self._flat_bytes(elements)) / self.gpt.degree)
        return (max(held) + self.machine.reserved_gib * 2**30) / 1e9

    def _flat_bytes(self, elements: int) -> int:
        """Return what DeepSpeed's ZeRO-1 allocates in one piece when a group's devices step.

        PyTorch's allocator cannot take it from the smaller blocks of activations that it keeps: the
        gradients of a device's share in 2 bytes and in 4, and a bucket to reduce and one to gather
        (DeepSpeed, runtime/zero/stage_1_and_2.py: ``averaged_gradients``, ``single_partition_of_
        fp32_groups``, ``reduce_bucket_size``, ``allgather_bucket_size``).
        """
        if not self.machine.zero:
            return 0
        return (2 + 4) * elements // self.replicas + 2 * ELEMENT * BUCKET * self.gpt.degree

    @cached_property
    def _as_it_is(self) -> Timeline:
        return self._timeline(self.machine.figures)

    @property
    def memory_gb(self) -> float:
        """The memory of a GPU, in 10^9 bytes."""
        return DEVICES[GPU].memory_gib * 2**30 / 1e9

    # --- the plan ---------------------------------------------------------------------------------

    def _timeline(self, figures: Figures) -> Timeline:
        """Replay one of the replicas, whose gradients are reduced among all."""
        graph = self.gpt.graph()
        problem = Problem(graph, self._cluster(figures), self._job(), self.machine.runtime)
        pipeline = self._placed(problem, self._division(graph))
        schedule = "interleaved 1f1b" if self.chunks > 1 else "1f1b"
        return simulate(pipeline, WHOLE[schedule](pipeline, balanced_assignment(pipeline)))

    def _cluster(self, figures: Figures) -> Cluster:
        size, count = self.gpt.degree, self.replicas
        rings = [
            [(stage * count + replica) * size + rank for replica in range(count)]
            for stage in range(self.stages)
            for rank in range(size)
        ]
        single = self.machine.cluster(self.gpus, figures, rings if count > 1 else ())
        if size == 1:
            return single
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
            shard_optimizer=self.machine.zero,
            max_stages_per_device=self.chunks,
        )

    def _division(self, graph: LayerGraph) -> list[tuple[str, ...]]:
        """Return the layers of each stage: blocks evenly, of a rest one more on the first ones."""
        first, *blocks, last = graph.layers
        count = self.stages * self.chunks
        each, rest = divmod(len(blocks), count)
        most = math.ceil(len(blocks) / count)
        left, found = iter(blocks), []
        for stage in range(count):
            number = each + (stage < rest)
            if self.machine.fills:
                number = min(most, len(blocks) - sum(map(len, found)))
            found.append(tuple(next(left) for _ in range(number)))
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
        if self.gpt.selective:
            specs = [replace(spec, recompute=()) for spec in specs]
        groups = [
            {device: names[index * count + number] for index, device in enumerate(rank)}
            for number in range(count)
        ]
        return place(problem, specs, groups=groups if count > 1 else ())
