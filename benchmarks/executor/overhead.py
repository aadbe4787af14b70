"""What the executor adds to the simulator's iteration: published schedules, emulated compute.

Four processes on this machine run plans whose operations take at least 5 ms by the clock and
compute nothing, with real messages of 262 kB; the excess over the predicted iteration is what
runtime, messages and waking up cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.executor.on_testbed import WARM_UP
from benchmarks.harness import Claim, Result
from planner import Cluster, Job, ModelSource, Plan, Problem, trace
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.errors import PipeplanError
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import published_orders

RANKS = 4
PLACEMENTS = {
    "one stage a device": (0, 1, 2, 3),
    "two stages a device, in turn": (0, 1, 2, 3, 0, 1, 2, 3),
    "two stages a device, as a V": (0, 1, 2, 3, 3, 2, 1, 0),
}
REPLICATED = "two stages, two replicas each"
SHORT_SCHEDULES = ("1f1b", "interleaved 1f1b", "zb-v")


def section(options: argparse.Namespace) -> Result:
    """Emulated iterations over the simulator's."""
    rows = []
    for placement, pipeline in pipelines():
        owner = balanced_assignment(pipeline)
        for name, orders in published_orders(pipeline, owner, split=True):
            if options.short and name not in SHORT_SCHEDULES:
                continue
            plan = plan_by_hand(pipeline, orders)
            predicted_s, measured_s = plan.predicted.iteration_time_s, measure(plan, options.steps)
            rows.append(
                {
                    **{"stages": placement, "schedule": name},
                    **{"predicted ms": 1e3 * predicted_s, "measured ms": 1e3 * measured_s},
                    "overhead %": 100 * (measured_s / predicted_s - 1),
                }
            )
    worst = max(row["overhead %"] for row in rows)
    text = "iterations of published schedules over the simulator's: worst overhead"
    return Result(rows, [Claim(text, worst, at_most=3.0, unit="%")])


def pipelines() -> Iterator[tuple[str, PlacedPipeline]]:
    """Twelve equal layers of a transformer on four devices, cut evenly."""
    job = Job(
        samples_per_microbatch=16,
        microbatches=8,
        optimizer="sgd",
        max_stages_per_device=2,
        model_arguments={"layers": 16},
    )
    graph = trace("models.gpt:gpt_tiny", job)
    source = ModelSource("models.gpt:gpt_tiny", job.model_arguments)
    problem = Problem(graph, _cluster(), job, source)
    names = list(graph.layers)
    for placement, devices in PLACEMENTS.items():
        parts = _even(names, len(devices))
        specs = [StageSpec(tuple(p), (f"d{d}",)) for p, d in zip(parts, devices, strict=True)]
        yield placement, place(problem, specs)
    first, second = _even(names, 2)
    specs = [StageSpec(tuple(first), ("d0", "d1")), StageSpec(tuple(second), ("d2", "d3"))]
    yield REPLICATED, place(problem, specs)


def _even(names: Sequence[str], count: int) -> list[list[str]]:
    """Divide the blocks evenly; embedding and head go to the first and the last part."""
    blocks = [name for name in names if name.startswith("h.")]
    starts = [blocks[len(blocks) * k // count] for k in range(count)]
    cuts = [0, *(names.index(start) for start in starts[1:]), len(names)]
    return [list(names[a:b]) for a, b in pairwise(cuts)]


def _cluster() -> Cluster:
    """Four devices so slow that every operation takes 5 ms, over a loopback of 1 GB/s."""
    names = [f"d{k}" for k in range(RANKS)]
    kind = {
        "memory_gib": 4,
        "memory_bandwidth_gb_per_s": 100,
        "peak_tflop_per_s": {"float32": 0.075},
    }
    link = {"bandwidth_gb_per_s": 1.0, "latency_us": 100}
    return Cluster.parse(
        {
            "format": "pipeplan-cluster/1",
            "name": "loopback",
            "switches": ["loopback"],
            "device_types": {"slow": kind},
            "devices": [{"name": name, "type": "slow"} for name in names],
            "links": [{"between": [name, "loopback"], **link} for name in names],
        },
        "cluster",
    )


def measure(plan: Plan, steps: int) -> float:
    """Return the median seconds of an emulated iteration.

    Raises:
        PipeplanError: if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, metrics = Path(folder) / "plan.json", Path(folder) / "metrics.jsonl"
        plan.save(path)
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        words += ["-m", "executor", str(path), "--emulate", "--steps", str(steps)]
        done = subprocess.run(
            [sys.executable, *words, "--metrics", str(metrics)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise PipeplanError(f"an emulated run failed:\n{done.stderr}")
        lines = metrics.read_text().splitlines()[WARM_UP:]
    return statistics.median(json.loads(line)["step_time_s"] for line in lines)
