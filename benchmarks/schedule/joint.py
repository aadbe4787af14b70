"""Whole plans of traced models on the sample clusters: how far from the best can they be?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import SAMPLE_CLUSTERS
from benchmarks.plans.drawn import chain, random_cluster, random_matrix
from benchmarks.schedule.rows import Settings
from planner import Cluster, Job, LayerGraph, Problem, solve, trace
from planner.units import plural

CLUSTER_GAPS = {
    "single_node": 0.02,
    "irregular": 0.07,
    "two_nodes": 0.02,
    "dapple_testbed": 0.12,
    "eight_nodes": 0.05,
}
"""Clusters, with the bars for gaps on them."""
CLUSTERS = tuple(CLUSTER_GAPS)
COLUMNS = ("model", "cluster", "devices", "plan", "iteration, ms", "bound, ms", "gap", "s", "")
MOST_ON_FEW = 16
"""Devices up to which 32 microbatches keep a pipeline busy; beyond it 256 are planned."""
LIMIT_S = 57.0
"""For a row that is to end within a minute."""
SEVERAL: dict[str, list[tuple[dict[str, object], float]]] = {
    "models.gpt:gpt2_xl": [
        ({"max_stages_per_device": count, "backward": backward, "replication": False}, bar)
        for count in (2, 4)
        for backward, bar in (("whole", 0.12), ("split", 0.05))
    ],
    "models.gpt:gpt2_small": [({"max_stages_per_device": 2}, 0.15)],
}
"""Spaces with several stages a device, by model, with the bars for their gaps."""
MIXED_GAP, MIXED_CLUSTERS = 0.1, (1, 2, 3, 4, 5, 6)
"""Bar for convolutional networks on mixed wires, and the seeds of their clusters."""


@dataclass(frozen=True)
class JointRow:
    """A model planned for a cluster; times in milliseconds, and the bar for the gap."""

    model: str
    cluster: str
    devices: int
    plan: str
    iteration_ms: float
    bound_ms: float
    seconds: float
    bar: float

    @property
    def gap(self) -> float:
        """Iteration time / bound - 1."""
        return self.iteration_ms / self.bound_ms - 1

    @property
    def cells(self) -> list[object]:
        """The row's cells, without a verdict."""
        return [
            self.model,
            self.cluster,
            self.devices,
            self.plan,
            f"{self.iteration_ms:.2f}",
            f"{self.bound_ms:.2f}",
            f"{self.gap:.2%}",
            round(self.seconds, 1),
        ]


def joint_rows(
    settings: Settings,
    limit_s: float = LIMIT_S,
    models: Sequence[str] | None = None,
    clusters: Sequence[str] = CLUSTERS,
) -> Iterator[JointRow]:
    """Models, by default every one, on clusters."""
    for model, job in jobs():
        if models is not None and model not in models:
            continue
        graph = trace(model, job)
        for name in clusters:
            cluster = cluster_named(name)
            many = len(cluster.devices) > MOST_ON_FEW
            problem = Problem(
                graph, cluster, job.model_copy(update={"microbatches": 256}) if many else job
            )
            title, bar = model.partition(":")[2], CLUSTER_GAPS[name]
            yield _planned(title, name, problem, settings, limit_s, bar)


def several_rows(
    settings: Settings, limit_s: float = LIMIT_S, clusters: Sequence[str] = CLUSTERS[:3]
) -> Iterator[JointRow]:
    """Plans with up to 2 and 4 stages a device: without replicas, then with them."""
    for model, job in jobs():
        for changes, bar in SEVERAL.get(model, ()):
            graph = trace(model, job)
            for name in clusters:
                problem = Problem(graph, cluster_named(name), job.model_copy(update=changes))
                space = f"{model.partition(':')[2]}, {_in_words(problem.job)}"
                yield _planned(space, name, problem, settings, limit_s, bar)


def mixed_rows(settings: Settings, limit_s: float = LIMIT_S) -> Iterator[JointRow]:
    """ResNet-101, and networks of layers as uneven as NASNet's, on random clusters."""
    job = Job(microbatches=32, samples_per_microbatch=16, precision="float32")
    resnet = trace("models.resnet:resnet101", job)
    for seed in MIXED_CLUSTERS:
        cluster = Cluster.from_data(random_cluster(seed))
        problem = Problem(resnet, cluster, job)
        yield _planned("resnet101", cluster.name, problem, settings, limit_s, MIXED_GAP)
    for seed in MIXED_CLUSTERS:
        graph = LayerGraph.parse(chain(60, "cnn", 2, seed))
        cluster = Cluster.from_data(random_matrix(8, 2, seed))
        problem = Problem(graph, cluster, Job(microbatches=32))
        title = f"60 uneven layers, seed {seed}"
        yield _planned(title, cluster.name, problem, settings, limit_s, MIXED_GAP)


def _in_words(job: Job) -> str:
    replicas = "with" if job.replication else "no"
    backward = "whole or split" if job.backward == "any" else job.backward
    return f"{job.max_stages_per_device} stages a device, {backward}, {replicas} replicas"


def _planned(
    model: str, cluster: str, problem: Problem, settings: Settings, limit_s: float, bar: float
) -> JointRow:
    begin = time.perf_counter()
    found = solve(problem, time_limit_s=limit_s, seed=settings.seed, workers=settings.workers)
    stages = found.plan.stages
    replicas = "-".join(str(len(stage.devices)) for stage in stages)
    return JointRow(
        model,
        cluster,
        len(problem.cluster.devices),
        f"{plural(len(stages), 'stage')}, replicas {replicas}",
        found.iteration_time_s * 1e3,
        found.lower_bound_s * 1e3,
        time.perf_counter() - begin,
        bar,
    )


def jobs() -> Iterator[tuple[str, Job]]:
    """Models and their jobs of 32 microbatches.

    Language models are in half precision, which every sample device has.
    """
    for model, samples, length in (
        ("models.gpt:gpt2_small", 4, 1024),
        ("models.gpt:gpt2_xl", 4, 1024),
        ("models.llama:llama2_7b", 1, 2048),
    ):
        yield (
            model,
            Job(
                microbatches=32,
                samples_per_microbatch=samples,
                precision="float16",
                model_arguments={"sequence_length": length},
            ),
        )
    for model, samples in (
        ("models.vgg:vgg19", 16),
        ("models.resnet:resnet50", 16),
        ("models.unet:unet", 4),
    ):
        yield model, Job(microbatches=32, samples_per_microbatch=samples, precision="float32")


def cluster_named(name: str) -> Cluster:
    """A sample, or eight machines like those of ``two_nodes``."""
    if name != "eight_nodes":
        return Cluster.load(SAMPLE_CLUSTERS / f"{name}.toml")
    nodes = [f"n{i}" for i in range(8)]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": name,
            "switches": ["network"],
            "nodes": [
                {"name": node, "devices": 8, "type": "A100-80GB", "link": "NVLink3"}
                for node in nodes
            ],
            "links": [{"between": [node, "network"], "preset": "InfiniBand-HDR"} for node in nodes],
        }
    )
