"""Traces of real training jobs (Lin et al., OSDI 2025), and the plans that Pipeplan makes for them.

The folder of ``--published`` has ``bytedance/``: ``timeline-ST.json.gz`` and
``timeline-SE.json.gz`` of the repository ByteDance-Seed/StragglerAnalysis. A trace has the
operations of stages, not of layers: each stage counts as :data:`BLOCKS` equal layers, the last one
as these and a head that takes the rest.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, Row
from benchmarks.plans.drawn import Data, cluster, graph
from benchmarks.plans.worker import problem_of
from benchmarks.rivals.layouts import judged
from planner import PipeplanError, Problem, adopt, solve

BLOCKS = 8
LINK_GB_PER_S = 10
"""All links are that wide; messages and gradients have the bytes that take the measured time."""
KIND = "traced"
Seconds = Mapping[tuple[str, int], Sequence[float]]
"""Seconds of operations by kind and stage."""


@dataclass(frozen=True)
class Traced:
    """A job of which a trace was published.

    Attributes:
        name: of its files.
        stages, replicas: of its layout, one stage a device.
        microbatches: of each pipeline.
        measured_s: of an iteration.
        ideal_s: the same if every operation took the mean time of its kind, by the simulator of
            the trace's authors.
    """

    name: str
    stages: int
    replicas: int
    microbatches: int
    measured_s: float
    ideal_s: float

    def problem(self, kinds: Seconds, backward: str) -> Problem:
        """Return the job with as many stages and replicas as it has.

        Args:
            kinds: the operations of its trace.
            backward: ``whole``, or ``any`` for split ones too.
        """
        last = self.stages - 1
        first, end = (
            [_median(kinds, f"{way}-compute", stage) for way in ("forward", "backward")]
            for stage in (0, last)
        )
        rows = [
            _layer(f"block{n}", *(s / BLOCKS for s in first)) for n in range(BLOCKS * (last + 1))
        ]
        rows.append(_layer("head", *(b - a for a, b in zip(first, end, strict=True))))
        sent = _bytes(_median(kinds, "forward-send", 0))
        reduced_s = sum(
            _median(kinds, kind, last) for kind in ("grads-reduce-scatter", "params-all-gather")
        )
        held = _bytes(reduced_s * self.replicas / (2 * (self.replicas - 1)) / BLOCKS)
        job = {
            "format": "pipeplan-job/1",
            "microbatches": self.microbatches * self.replicas,
            "samples_per_microbatch": 1,
            "precision": "float32",
            "backward": backward,
            "recompute": False,
            "overlap_reduction": False,
            "equal_pipelines": True,
            "min_stages": self.stages,
            "max_stages": self.stages,
        }
        blocks = len(rows) - 1
        model = graph(self.name, rows, [sent] * blocks, [*[held] * blocks, 0])
        machines = machines_of(self.stages * self.replicas)
        return problem_of({"graph": model, "cluster": machines, "job": job})

    def stages_of(self, problem: Problem) -> list[list[str]]:
        """Return the layers of the stages that were traced."""
        names = list(problem.graph.layers)
        cuts = [BLOCKS * stage for stage in range(self.stages)]
        return [names[a:b] for a, b in zip(cuts, [*cuts[1:], len(names)], strict=True)]


TRACES = (Traced("ST", 4, 2, 4, 2.173, 1.843), Traced("SE", 2, 32, 8, 9.067, 5.897))


def machines_of(count: int) -> Data:
    """Return so many equal devices on a switch."""
    memory = {"memory_gib": 80, "memory_bandwidth_gb_per_s": 2000}
    names = [f"d{n}" for n in range(count)]
    link = {"bandwidth_gb_per_s": LINK_GB_PER_S, "latency_us": 5}
    return cluster(
        "traced",
        {KIND: {**memory, "peak_tflop_per_s": {"float32": 100}}},
        devices=[{"name": name, "type": KIND} for name in names],
        switches=["network"],
        links=[{"between": [name, "network"], **link} for name in names],
    )


def durations(path: Path) -> Seconds:
    """Return the seconds of a timeline's operations.

    Raises:
        PipeplanError: if the file is no timeline.
    """
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))
        named = (event for event in events if event["name"] == "thread_name")
        lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
        for event in events:
            if event["ph"] == "X":  # On a lane such as "PP rank 0, TP rank 0, compute".
                stage = int(lanes[event["pid"], event["tid"]].split(",")[0].rpartition(" ")[2])
                found[event["name"], stage].append(event["dur"] * 1e-6)
    except (OSError, ValueError, KeyError) as error:
        raise PipeplanError(f"--published: {path} is no timeline of a trace: {error}") from None
    return found


def _median(kinds: Seconds, kind: str, stage: int) -> float:
    return statistics.median(kinds[kind, stage])


def _bytes(seconds: float) -> int:
    return round(seconds * LINK_GB_PER_S * 1e9)


def _layer(name: str, forward_s: float, backward_s: float) -> Data:
    half_s = backward_s / 2
    times = {"forward_s": forward_s, "input_gradient_s": half_s, "weight_gradient_s": half_s}
    return {"name": name, "stash_bytes": 1, "measured": {KIND: times}}


def section(options: argparse.Namespace) -> Result:
    """Traces of real jobs."""
    folder, rows = options.published / "bytedance", []
    for traced in TRACES:
        kinds = durations(folder / f"timeline-{traced.name}.json.gz")
        rows += [_row(traced, kinds, way, options.seconds) for way in ("whole", "any")]
    return judged(rows)


def _row(traced: Traced, kinds: Seconds, backward: str, seconds: float) -> Row:
    problem = traced.problem(kinds, backward)
    theirs = adopt(problem, traced.stages_of(problem), replicas=traced.replicas)
    ours, their_s = solve(problem, time_limit_s=seconds), theirs.predicted.iteration_time_s
    return {
        "job": traced.name,
        "stages x replicas": f"{traced.stages} x {traced.replicas}",
        "backwards": backward,
        "measured, s": traced.measured_s,
        "their ideal, s": traced.ideal_s,
        "their split, s": their_s,
        "ours, s": ours.iteration_time_s,
        "theirs / ours": their_s / ours.iteration_time_s,
        "bound, s": ours.lower_bound_s,
        "our stages": [len(stage.layers) for stage in ours.plan.stages],
    }
