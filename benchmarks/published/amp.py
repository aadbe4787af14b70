"""Trials of AMP (Li et al., NeurIPS 2022), from a checkout of github.com/DachengLi1/AMP.

``src/results`` has the logs of 53 trials of a 24-layer GPT-2 on each of two clusters, with the
measured iteration (``r_cost``), and ``src/known_cost`` the measured forwards of its layers for one
sample, by GPU and tensor degree. Two kinds of trials are left out, because their layers were not
timed: those with larger microbatches, and those with tensor parallelism, whose forwards contain
all-reduces that a backward does not double.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.published.profiled_chain import (
    Measured,
    ProfiledLayer,
    chain_graph,
)
from benchmarks.published.run import PublishedRun, Source
from planner.cluster.cluster import Cluster
from planner.cluster.presets import DEVICES
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RULES

FOLDER = "AMP"
HIDDEN, SEQUENCE, BLOCKS, VOCABULARY, BATCH = 1024, 1024, 24, 52_256, 32
BACKWARD_OVER_FORWARD = 2.0
"""AMP's own assumption (``cost_homo.py``): it timed forwards alone."""
GPUS_PER_HOST = 4
_STATES = (
    "Only forwards were timed, for one sample; a backward takes twice as long, as AMP assumes. "
    "Links have the bandwidths of AMP's own scripts, without latency; the GPUs of a host share its "
    "network card. float16 with gradients reduced in float32 after the last backward, as in the "
    "scripts' DeepSpeed configuration (`fp32_allreduce`); that is for the reduction among replicas "
    "alone, and stages reduce the tied embedding's gradient as it is, in float16 "
    "(DeepSpeed/deepspeed/runtime/pipe/module.py, allreduce_tied_weight_gradients). "
    "Left out: trials with larger microbatches, which were not "
    "timed; trials with tensor parallelism, whose forwards contain all-reduces that a backward "
    "does not double (replayed by AMP's assumption all the same, those 12 are off by 4 to 47 %, "
    "median 29 %); trials of TransGAN, whose parameters are not published; trials that failed."
)


@dataclass(frozen=True)
class Host:
    """A kind of host: GPU as AMP names it, preset for memory bandwidth, Gbit/s outside and in."""

    gpu: str
    preset: str
    outer_gbit_per_s: float
    inner_gbit_per_s: float


@dataclass(frozen=True)
class Series:
    """Trials on one cluster."""

    source: Source
    log: str
    hosts: tuple[Host, ...]


_G4 = Host("G4", "L4", 50, 50)
_P3 = Host("P3", "V100-16GB", 10, 170)


def _series(name: str, log: str, script: str, hosts: tuple[Host, ...]) -> Series:
    cites = (
        f"Li et al. 2022, AMP (NeurIPS), github.com/DachengLi1/AMP: iterations in src/results/{log}"
        f", forwards of layers in src/known_cost/gpt2_*.npy, links in src/{script}."
    )
    return Series(Source("AMP", name, cites, _STATES), log, hosts)


SERIES = (
    _series("GPT-2 on 16 T4", "homogeneous_results.txt", "homogeneous.py", (_G4, _G4, _G4, _G4)),
    _series(
        "GPT-2 on 12 V100 and 4 T4",
        "het_cluster_results.txt",
        "het_cluster.py",
        (_P3, _P3, _P3, _G4),
    ),
)
_TRIAL = re.compile(
    r"Simulating result: \S+, \[([\d, ]+)\], 1, \{'mp_deg': tensor\(\[1\.\]\), "
    r"'dp_deg': tensor\(\[(\d+)\.\]\), 'pp_deg': tensor\(\[\d+\.\]\)\}, "
    r"with p_cost: tensor\(\[[\d.]+\]\), r_cost: ([\d.]+)"
)

_JOB = Job(
    name="gpt2",
    samples_per_microbatch=1,
    microbatches=BATCH,
    precision="float32",
    backward="whole",
    overlap_reduction=False,
)


def runs(data: Path) -> Iterator[PublishedRun]:
    """Yield the rows below a folder of checkouts; none without a checkout of AMP."""
    source = data / FOLDER / "src"
    for series in SERIES if source.is_dir() else ():
        text = (source / "results" / series.log).read_text()
        graphs, cluster = (
            [_graph(source, series, is_cut=cut) for cut in (False, True)],
            _cluster(series),
        )
        for cuts, replicas, seconds in _TRIAL.findall(text):
            bounds = [int(cut) for cut in cuts.split(",")]
            problem = Problem(graphs[len(bounds) > 2], cluster, _JOB)
            yield _run(series.source, problem, bounds, int(replicas), float(seconds))


def _run(
    source: Source, problem: Problem, bounds: Sequence[int], replicas: int, measured_s: float
) -> PublishedRun:
    names = list(problem.graph.layers)
    return PublishedRun(
        source=source,
        name=f"stages at layers {'-'.join(map(str, bounds))}, {replicas} replicas",
        measured_s=measured_s,
        problem=problem,
        runtime=RULES["deepspeed"],
        stages=tuple(tuple(names[begin:end]) for begin, end in pairwise(bounds)),
        replicas=replicas,
    )


def _graph(source: Path, series: Series, *, is_cut: bool) -> LayerGraph:
    """Return the layers with the times of all GPUs of a cluster; embedding and head are tied.

    Args:
        source: the folder of the sources.
        series: the trials.
        is_cut: whether embedding and head are in different stages. These reduce half as many bytes
            of the gradient as replicas do, so that half of it is tied.
    """
    graphs = []
    for host in dict.fromkeys(series.hosts):
        forwards = np.load(source / "known_cost" / f"gpt2_{host.gpu}_1.npy")
        measured = Measured(host.gpu, DEVICES[host.preset], 1, "float32")
        layers = [_layer(index, float(value)) for index, value in enumerate(forwards)]
        graphs.append(chain_graph("gpt2", layers, measured))
    first, *others = graphs
    rows = []
    for index, row in enumerate(first.record.layers):
        times = dict(row.measured)
        for graph in others:
            times |= graph.record.layers[index].measured
        rows.append(row.model_copy(update={"measured": times}))
    embedding, *parameters = first.record.parameters
    names = {0: (embedding.name,), HEAD: (embedding.name,)}
    if is_cut:
        elements = embedding.elements // 2
        half = {"elements": elements, "bytes": embedding.bytes // 2}
        own = {place: f"{embedding.name} of {rows[place].name}" for place in names}
        parameters += [embedding.model_copy(update={**half, "name": own[k]}) for k in names]
        names = {place: (embedding.name, own[place]) for place in names}
        embedding = embedding.model_copy(update=half)
    layers = [
        row.model_copy(update={"parameters": names.get(index, row.parameters)})
        for index, row in enumerate(rows)
    ]
    update = {"layers": tuple(layers), "parameters": (embedding, *parameters)}
    return LayerGraph.from_record(first.record.model_copy(update=update))


HEAD = BLOCKS + 4
"""The layers of AMP's scripts: embedding, nothing, blocks, two of nothing, head, nothing."""


def _layer(index: int, forward_s: float) -> ProfiledLayer:
    elements = {0: VOCABULARY * HIDDEN}.get(index, 12 * HIDDEN**2 if 2 <= index < 2 + BLOCKS else 0)
    width = VOCABULARY if index >= HEAD else HIDDEN
    return ProfiledLayer(
        name=f"layers.{index}",
        forward_s=forward_s,
        backward_s=forward_s * BACKWARD_OVER_FORWARD,
        output_bytes=SEQUENCE * width * 2,
        parameter_bytes=elements * 4,
        stash_bytes=0,
    )


def _cluster(series: Series) -> Cluster:
    """Return the GPUs of each host behind its network card."""
    devices, links = [], []
    for number, host in enumerate(series.hosts):
        outer = {"bandwidth_gb_per_s": host.outer_gbit_per_s / 8, "source": "datasheet"}
        inner = {"bandwidth_gb_per_s": host.inner_gbit_per_s / 8, "source": "datasheet"}
        links.append({"between": [f"host{number}", "network"], **outer})
        for gpu in range(GPUS_PER_HOST):
            name = f"host{number}/gpu{gpu}"
            devices.append({"name": name, "type": host.gpu})
            links.append({"between": [name, f"host{number}"], **inner})
    types = {host.gpu: DEVICES[host.preset].model_dump() for host in series.hosts}
    hosts = [f"host{number}" for number in range(len(series.hosts))]
    return Cluster.parse(
        {
            "format": "pipeplan-cluster/1",
            "name": "amp",
            "device_types": types,
            "devices": devices,
            "switches": ["network", *hosts],
            "links": links,
        },
        "amp",
    )
