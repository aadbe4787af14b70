"""What the executor adds to the simulator's iteration: published schedules, emulated compute.

Usage:
    python -m benchmarks.executor.overhead [--steps N] [--json]

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from benchmarks.executor.emulated import emulated_times
from planner import Cluster, Job, Plan, Problem, trace
from planner.assembly import plan_by_hand
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.schedules.assignment import balanced_assignment
from planner.schedules.published import published_orders

RANKS = 4
PLACEMENTS = {
    "one stage a device": (0, 1, 2, 3),
    "two stages a device, in turn": (0, 1, 2, 3, 0, 1, 2, 3),
    "two stages a device, as a V": (0, 1, 2, 3, 3, 2, 1, 0),
}
REPLICATED = "two stages, two replicas each"


@dataclass(frozen=True)
class Row:
    """One schedule: predicted seconds of an iteration, and the measured median."""

    placement: str
    schedule: str
    predicted_s: float
    measured_s: float

    @property
    def overhead(self) -> float:
        """Measured over predicted, less one."""
        return self.measured_s / self.predicted_s - 1

    @property
    def cells(self) -> list[str]:
        """The row's cells, in the order of :data:`COLUMNS`."""
        return [
            *(self.placement, self.schedule),
            f"{self.predicted_s * 1e3:.1f}",
            f"{self.measured_s * 1e3:.1f}",
            f"{self.overhead:+.1%}",
        ]


def rows(steps: int, schedules: Sequence[str] | None = None) -> Iterator[Row]:
    """Published schedules, by default every one, on every placement of stages that it is for."""
    for placement, pipeline in pipelines():
        owner = balanced_assignment(pipeline)
        for name, orders in published_orders(pipeline, owner, split=True):
            if schedules is not None and name not in schedules:
                continue
            plan = plan_by_hand(pipeline, orders)
            measured_s = measure(plan, steps)
            yield Row(placement, name, plan.predicted.iteration_time_s, measured_s)


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
    problem = Problem(graph, _cluster(), job)
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
    """Median seconds of an emulated iteration.

    Raises:
        RuntimeError: if the run fails.
    """

    def launch(arguments: Sequence[str]) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        done = subprocess.run(
            [sys.executable, *torchrun, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)

    return statistics.median(emulated_times(plan, steps, launch))


COLUMNS = ("stages", "schedule", "predicted ms", "measured ms", "overhead")


def overhead_rows(steps: int) -> list[list[str]]:
    """A line for each schedule, and the worst."""
    found = list(rows(steps))
    worst = max(row.overhead for row in found)
    return [*(row.cells for row in found), ["**worst**", "", "", "", f"**{worst:+.1%}**"]]


def main() -> None:
    """Print a line for each schedule as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for row in rows(options.steps):
        print(json.dumps({**asdict(row), "overhead": row.overhead}), flush=True)


if __name__ == "__main__":
    main()
