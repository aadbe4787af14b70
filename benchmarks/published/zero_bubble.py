"""Qi et al. 2024, "Zero bubble (almost) pipeline parallelism" (ICLR; arXiv 2401.10241).

Table 3 has the models, table 4 the measured throughput, table 9 the profiled times of a stage, and
table 12 the throughput with few microbatches, for which no times were profiled: those of the fewest
microbatches in table 9 are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published.host_time import HostTime
from benchmarks.published.profiled_chain import Measured, ProfiledLayer, chain_graph
from benchmarks.published.run import PublishedRun, Source
from planner.cluster.cluster import Cluster
from planner.cluster.presets import DEVICES
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.plan.runtime_rules import PIPEPLAN, RULES

DEVICE = "A100-80GB"
SEQUENCE, VOCABULARY, ELEMENT_BYTES = 1024, 51_200, 2

SOURCE = Source(
    publication="Zero bubble",
    name="GPTs on up to 32 A100",
    cites=(
        "Qi et al. 2024, Zero bubble (almost) pipeline parallelism, arXiv 2401.10241: models table "
        "3, throughput tables 4 and 12, profiled times of a stage and of a message table 9."
    ),
    states=(
        "All stages take the profiled time of one (the authors gave the first and last stage a "
        "layer less to that end). Throughput is printed with two or three digits: up to 0.7 % of "
        "rounding. ZB-1p is replayed as ZB-H1, which has the same bubble rate in the paper's table "
        "5. Interleaved stages divide the profiled time equally among their chunks, as the paper "
        "does. ZB-2p is left out: its iterations overlap each other, so its throughput is not one "
        "over the time of an iteration. Of table 12 only 1F1B, with the times profiled for the "
        "fewest microbatches of table 9."
    ),
)

HOST = HostTime(
    where="Megatron-LM as the authors changed it, on their A100",
    figure="computation_us",
    at_most=10_000,
    because=(
        "Profiled times end with a synchronisation of the device and leave out what comes between "
        "two operations (github.com/sail-sg/zero-bubble-pipeline-parallelism, tag "
        "zero-bubble-v0.1.0, megatron/core/timers.py and pipeline_parallel/p2p_communication.py: "
        "exchanges of 1F1B synchronise too, so that no launch is ahead of the device). The two "
        "agree on 1F1B; that the schedules of the authors and interleaved ones lose as much is "
        "seen, not explained."
    ),
)


@dataclass(frozen=True)
class Model:
    """A model of table 3.

    Attributes:
        name: its size.
        blocks: transformer layers; with embedding and head they fill the stages evenly.
        hidden: hidden size.
        stages: pipelines ranks, one GPU each.
        samples: of a microbatch.
    """

    name: str
    blocks: int
    hidden: int
    stages: int
    samples: int


MODELS = (
    Model("1.5B", 22, 2304, 8, 6),
    Model("6.2B", 30, 4096, 8, 3),
    Model("14.6B", 46, 5120, 16, 1),
    Model("28.3B", 62, 6144, 32, 1),
)

GIVES_HOST = (MODELS[0].name, 24, "1f1b")
"""The first row of table 4."""

# Table 9: milliseconds of F, B, W and a message, by microbatches.
PROFILED: Mapping[str, Mapping[int, tuple[float, float, float, float]]] = {
    "1.5B": {
        24: (18.522, 18.086, 9.337, 0.601),
        32: (18.513, 18.086, 9.331, 0.626),
        64: (18.546, 18.097, 9.321, 0.762),
    },
    "6.2B": {
        24: (29.718, 29.444, 19.927, 0.527),
        32: (29.802, 29.428, 19.530, 0.577),
        64: (29.935, 29.621, 19.388, 0.535),
    },
    "14.6B": {
        48: (11.347, 11.248, 8.132, 0.377),
        64: (11.307, 11.254, 8.101, 0.379),
        128: (11.325, 11.308, 8.109, 0.378),
    },
    "28.3B": {
        96: (10.419, 10.207, 7.715, 0.408),
        128: (10.408, 10.204, 7.703, 0.408),
        256: (10.402, 10.248, 7.698, 0.460),
    },
}

# Table 4: samples per GPU and second, in the order of the microbatches above.
THROUGHPUT: Mapping[str, Mapping[str, Sequence[float]]] = {
    "1f1b": {
        "1.5B": (11.8, 12.5, 13.6),
        "6.2B": (3.50, 3.70, 4.03),
        "14.6B": (1.40, 1.49, 1.64),
        "28.3B": (0.76, 0.80, 0.88),
    },
    "interleaved-1f1b": {
        "1.5B": (13.1, 13.4, 13.9),
        "6.2B": (4.01, 4.08, 4.19),
        "14.6B": (1.54, 1.59, 1.66),
        "28.3B": (0.82, 0.85, 0.90),
    },
    "zb-h1": {
        "1.5B": (12.9, 13.4, 14.2),
        "6.2B": (3.88, 4.00, 4.20),
        "14.6B": (1.61, 1.67, 1.76),
        "28.3B": (0.87, 0.90, 0.96),
    },
}

# Table 12: samples per GPU and second of 1F1B, by microbatches.
FEW: Mapping[str, Mapping[int, float]] = {
    "1.5B": {2: 3.56, 4: 5.74, 8: 8.26},
    "6.2B": {2: 1.04, 4: 1.69, 8: 2.45},
    "14.6B": {4: 0.39, 8: 0.65, 16: 0.95},
}


def runs() -> Iterator[PublishedRun]:
    """Yield the rows of tables 4 and 12."""
    for schedule, by_model in THROUGHPUT.items():
        for model in MODELS:
            profiled = PROFILED[model.name]
            for microbatches, rate in zip(profiled, by_model[model.name], strict=True):
                yield _run(model, schedule, microbatches, rate, profiled[microbatches])
    for model in MODELS:
        fewest = next(iter(PROFILED[model.name].values()))
        for microbatches, rate in FEW.get(model.name, {}).items():
            yield _run(model, "1f1b", microbatches, rate, fewest)


def _run(
    model: Model, schedule: str, microbatches: int, rate: float, times_ms: Sequence[float]
) -> PublishedRun:
    chunks = (model.blocks + 2) // model.stages if schedule == "interleaved-1f1b" else 1
    graph = _graph(model, chunks, times_ms)
    job = Job(
        name=model.name,
        samples_per_microbatch=model.samples,
        microbatches=microbatches,
        precision="float16",
        backward="split" if schedule == "zb-h1" else "whole",
        max_stages_per_device=chunks,
    )
    return PublishedRun(
        source=SOURCE,
        name=f"{model.name}, {model.stages} stages, {microbatches} microbatches, {schedule}",
        measured_s=microbatches * model.samples / (rate * model.stages),
        problem=Problem(graph, _cluster(model, times_ms[3]), job),
        stages=tuple((name,) for name in graph.layers),
        # The authors' own schedules run on a runtime of their own, whose messages overlap.
        runtime=PIPEPLAN if schedule == "zb-h1" else RULES["megatron"],
        schedule=schedule,
        pipeline_size=model.stages,
        host=HOST,
        gives_host=(model.name, microbatches, schedule) == GIVES_HOST,
    )


def _message_bytes(model: Model) -> int:
    return model.samples * SEQUENCE * model.hidden * ELEMENT_BYTES


def _graph(model: Model, chunks: int, times_ms: Sequence[float]) -> LayerGraph:
    """Return a layer for each stage, or for each chunk of it."""
    count = model.stages * chunks
    forward_s, input_s, weight_s = (value * 1e-3 / chunks for value in times_ms[:3])
    elements = (12 * model.blocks * model.hidden**2 + 2 * VOCABULARY * model.hidden) // count
    layers = [
        ProfiledLayer(
            name=f"stage.{index}",
            forward_s=forward_s,
            backward_s=input_s + weight_s,
            output_bytes=_message_bytes(model),
            parameter_bytes=ELEMENT_BYTES * elements,
            stash_bytes=0,
            weight_gradient_s=weight_s,
        )
        for index in range(count)
    ]
    measured = Measured(DEVICE, DEVICES[DEVICE], model.samples, "float16")
    return chain_graph(model.name, layers, measured)


def _cluster(model: Model, message_ms: float) -> Cluster:
    """Return GPUs in a ring of links that take the profiled time of a message."""
    names = [f"gpu{index}" for index in range(model.stages)]
    gb_per_s = _message_bytes(model) / (message_ms * 1e-3) / 1e9
    link = {"bandwidth_gb_per_s": gb_per_s, "latency_us": 0.0, "source": "measured"}
    return Cluster.parse(
        {
            "format": "pipeplan-cluster/1",
            "name": model.name,
            "device_types": {DEVICE: DEVICES[DEVICE].model_dump()},
            "devices": [{"name": name, "type": DEVICE} for name in names],
            "links": [
                {"between": [name, following], **link}
                for name, following in zip(names, [*names[1:], names[0]], strict=True)
            ],
        },
        model.name,
    )
