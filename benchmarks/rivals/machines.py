"""The clusters and models: even and uneven clusters of 8 to 64 GPUs, models of 0.8B to 70B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner import Cluster, Job, LayerGraph
from planner.tracing.sharding.record import with_splits
from planner.tracing.trace import trace_step

DEGREES = (2, 4, 8)
"""Sizes of groups that models are traced for, besides single devices."""
MANY = 24
"""Devices of a cluster beyond which an iteration has more samples."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster.

    Attributes:
        devices: how many.
        type: of its devices.
        inside, outside: presets of the links between its devices, and of its network card.
    """

    devices: int
    type: str
    inside: str
    outside: str


@dataclass(frozen=True)
class Machines:
    """A cluster to plan for.

    Attributes:
        name: of the cluster.
        nodes: its machines, on one switch.
    """

    name: str
    nodes: tuple[Node, ...]

    @property
    def is_even(self) -> bool:
        """Whether all its machines are alike."""
        return len(set(self.nodes)) == 1

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        rows = {f"n{number}": node for number, node in enumerate(self.nodes)}
        return Cluster.from_data(
            {
                "format": "pipeplan-cluster/1",
                "name": self.name,
                "switches": ["network"],
                "nodes": [
                    {"name": name, "devices": row.devices, "type": row.type, "link": row.inside}
                    for name, row in rows.items()
                ],
                "links": [
                    {"between": [name, "network"], "preset": row.outside}
                    for name, row in rows.items()
                ],
            }
        )


BIG = Node(8, "A100-80GB", "NVLink3", "InfiniBand-HDR")
EVEN = (
    Machines("one node: 8 A100-80GB", (BIG,)),
    Machines("two nodes: 16 A100-80GB", (BIG,) * 2),
    Machines(
        "four PCIe nodes: 32 A100-40GB",
        (Node(8, "A100-40GB", "PCIe4-x16", "Ethernet-100G"),) * 4,
    ),
    Machines("eight nodes: 64 A100-80GB", (BIG,) * 8),
)
UNEVEN = (
    Machines(
        "irregular: 8 A100-80GB, 4 A100-40GB, 2 x 2 RTX-3090",
        (
            BIG,
            Node(4, "A100-40GB", "PCIe4-x16", "Ethernet-100G"),
            *(Node(2, "RTX-3090", "PCIe4-x16", "Ethernet-25G"),) * 2,
        ),
    ),
    Machines(
        "three kinds: 8 A100-80GB, 8 V100-32GB, 4 RTX-3090",
        (
            BIG,
            Node(8, "V100-32GB", "NVLink2", "Ethernet-100G"),
            Node(4, "RTX-3090", "PCIe4-x16", "Ethernet-25G"),
        ),
    ),
    Machines(
        "two kinds: 8 H100-80GB, 16 A100-40GB",
        (
            Node(8, "H100-80GB", "NVLink4", "InfiniBand-NDR"),
            *(Node(8, "A100-40GB", "NVLink3", "InfiniBand-HDR"),) * 2,
        ),
    ),
    Machines(
        "unequal nodes: 8 + 4 + 4 + 2 A100-80GB",
        (
            BIG,
            *(Node(4, "A100-80GB", "NVLink3", "InfiniBand-HDR"),) * 2,
            Node(2, "A100-80GB", "NVLink3", "Ethernet-100G"),
        ),
    ),
)
CLUSTERS = tuple(row for pair in zip(UNEVEN, EVEN, strict=True) for row in pair)


@dataclass(frozen=True)
class Model:
    """A model to plan.

    Attributes:
        factory: of the zoo.
        sizes: of microbatches, in samples, that are tried.
    """

    factory: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The factory without its module."""
        return self.factory.partition(":")[2]


MODELS = (
    Model("models.llama:llama2_7b", (1, 2, 4)),
    Model("models.llama:llama2_13b", (1, 2, 4)),
    Model("models.gpt:gpt2_large", (1, 2, 4, 8)),
    Model("models.llama:llama2_70b", (1, 2, 4)),
)


def job_of(samples: int, batch: int) -> Job:
    """Return the job of an iteration of so many samples, in microbatches of some of them.

    One stage a device, whole and split backwards, replicas, recomputation; sequence parallelism
    inside groups, as Megatron-LM has it.
    """
    return Job(
        microbatches=batch // samples,
        samples_per_microbatch=samples,
        precision="float16",
        tensor_parallel="any",
        sequence_parallel=True,
    )


def batch_of(cluster: Cluster) -> int:
    """Return the samples of an iteration: more on many devices, which they keep busy."""
    return 64 if len(cluster.devices) <= MANY else 128


def graph_of(model: Model, samples: int) -> LayerGraph:
    """Return a model's graph with its splits over groups, at so many samples a microbatch."""
    step = trace_step(model.factory, job_of(samples, samples))
    return LayerGraph.from_record(with_splits(step, DEGREES, sequence=True))


def pairs() -> Iterator[tuple[Model, Machines]]:
    """Yield all pairs, so that the first ones have every cluster and every model."""
    for shift in range(len(MODELS)):
        for number, machines in enumerate(CLUSTERS):
            yield MODELS[(number // 2 + number + shift) % len(MODELS)], machines
