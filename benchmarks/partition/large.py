"""Whole plans on 64 and 1,024 GPUs, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

Cells = list[object]
MOST_GIB = 4
"""Memory that a search may take."""
COLUMNS = ("problem", "s", "GiB", "verified", "iteration s", "bound s", "gap", "bar", "")

PLANNED = """
import json, resource, sys, time
from benchmarks.partition.instances import layers, problem, two_level
from benchmarks.schedule.joint import cluster_named, jobs
from planner import Problem, solve, trace, verify
what, limit_s, workers = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
if "nodes" in what:
    nodes = tuple(what["nodes"])
    kind = "transformer" if len(nodes) == 1 else "cnn"
    instance = problem(layers(200, kind, len(nodes), 1), two_level(nodes, 8), 1024, True)
else:
    model, job = next(row for row in jobs() if row[0].endswith(":" + what["model"]))
    job = job.model_copy(update={"microbatches": what["microbatches"]})
    instance = Problem(trace(model, job), cluster_named("eight_nodes"), job)
begin = time.perf_counter()
result = solve(instance, time_limit_s=limit_s, workers=workers)
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "problems": len(verify(result.plan)),
    "iteration_s": result.iteration_time_s, "bound_s": result.lower_bound_s, "gap": result.gap,
    "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))
"""


class WholePlan(NamedTuple):
    """A problem to plan: what it is for the script, the time it may take, and its bar."""

    name: str
    what: dict[str, object]
    limit_s: float
    most_s: float
    bar: float


CASES = (
    WholePlan(
        "1,024 GPUs, 128 nodes, one type, 200 layers (transformer)",
        {"nodes": [128]},
        170.0,
        180.0,
        0.12,
    ),
    WholePlan(
        "1,024 GPUs, 48 + 48 + 32 nodes, three types, 200 layers (cnn)",
        {"nodes": [48, 48, 32]},
        170.0,
        180.0,
        0.25,
    ),
    *(
        WholePlan(
            f"64 GPUs, eight nodes, {model}, {count} microbatches",
            {"model": model, "microbatches": count},
            57.0,
            65.0,
            0.05,
        )
        for model in ("gpt2_small", "gpt2_xl", "resnet50")
        for count in (128, 256)
    ),
)


def whole_plans(workers: int) -> list[Cells]:
    """A row a problem."""
    return [_row(case, workers) for case in CASES]


def _row(case: WholePlan, workers: int) -> Cells:
    command = [sys.executable, "-c", PLANNED, json.dumps(case.what)]
    command += [str(case.limit_s), str(workers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output)
    print(case.name, f"{found['gap']:.2%}", file=sys.stderr, flush=True)
    is_valid = found["seconds"] <= case.most_s and found["peak_gib"] <= MOST_GIB
    reached = is_valid and not found["problems"] and found["gap"] <= case.bar
    return [
        case.name,
        f"{found['seconds']:.0f}",
        f"{found['peak_gib']:.2f}",
        "NO" if found["problems"] else "yes",
        f"{found['iteration_s']:.4f}",
        f"{found['bound_s']:.4f}",
        f"{found['gap']:.1%}",
        f"{case.bar:.0%}",
        "reached" if reached else "NOT reached",
    ]
