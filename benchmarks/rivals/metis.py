"""Metis's planner (Um et al., ATC 2024) on its published profile: GPT of 10 layers on 16 A100.

The folder of ``--published`` has ``metis/``: the files ``DeviceType.A100_tpT_bsS.json`` of the
repository SamsungLabs/Metis, T devices in a group and S samples a microbatch. Its hosts have four
devices, its bandwidths are those of its example, and an iteration has 128 samples. The example's
own result has T4 as well, whose profile was not published.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness import Result, Row
from benchmarks.plans.drawn import PHASES, Data, cluster, graph
from benchmarks.plans.worker import problem_of
from benchmarks.rivals.layouts import judged
from planner import PipeplanError, Plan, Problem, adopt, solve

FIGURES = ROOT / "benchmarks" / "results" / "metis.json"
"""Seconds of its best plan and what its own cost model says of plans, by their shapes."""
DEVICES, NODE, BATCH = 16, 4, 128
DEGREES, SAMPLES = (1, 2, 4), (1, 2, 4)
INSIDE_GB_PER_S, OUTSIDE_GB_PER_S = 46, 10
SEQUENCE, WIDTH = 1024, 4096
KIND = "A100"


def problem(folder: Path, degree: int, samples: int) -> Problem:
    """Return the problem whose devices are groups, each with the times of the profile.

    Raises:
        PipeplanError: if the profile cannot be read.
    """
    path = folder / f"DeviceType.{KIND}_tp{degree}_bs{samples}.json"
    try:
        read = json.loads(path.read_text())
        times = read["execution_time"]["layer_compute_total_ms"]
        # Metis adds the time between forward and backward to the last stage of each microbatch.
        times[-1] = read["execution_time"]["forward_backward_time_ms"] - sum(times[:-1])
        held = read["model"]["parameters"]["parameters_per_layer_bytes"]
    except (OSError, ValueError, KeyError) as error:
        raise PipeplanError(f"--published: {path} is no profile of Metis: {error}") from None
    rows = [
        # A third of each layer's time is its forward, as in a matrix product.
        {
            "name": f"layer{number}",
            "stash_bytes": 1,
            "measured": {
                KIND: dict.fromkeys((f"{phase}_s" for phase in PHASES), time / 3e3),
            },
        }
        for number, time in enumerate(times)
    ]
    sent = [samples * SEQUENCE * WIDTH] * (len(rows) - 1)
    job = {
        "format": "pipeplan-job/1",
        "microbatches": BATCH // samples,
        "samples_per_microbatch": samples,
        "precision": "float32",
        "backward": "whole",
        "recompute": False,
        "overlap_reduction": False,
    }
    model = graph("metis", rows, sent, [bytes_ // degree // 4 * 4 for bytes_ in held])
    model["samples_per_microbatch"] = samples
    return problem_of({"graph": model, "cluster": machines(degree), "job": job})


def machines(degree: int) -> Data:
    """Return four hosts on a switch, whose devices are groups of a size."""
    memory = {"memory_gib": 160, "memory_bandwidth_gb_per_s": 2000}
    nodes, inside = range(DEVICES // NODE), {"bandwidth_gb_per_s": INSIDE_GB_PER_S}
    return cluster(
        "metis",
        {KIND: {**memory, "peak_tflop_per_s": {"float32": 100}}},
        nodes=[
            {"name": f"n{n}", "devices": NODE // degree, "type": KIND, "link": inside}
            for n in nodes
        ],
        switches=["network"],
        links=[
            {"between": [f"n{n}", "network"], "bandwidth_gb_per_s": OUTSIDE_GB_PER_S} for n in nodes
        ],
    )


def shape_of(plan: Plan, degree: int) -> str:
    """Return a plan as Metis's cost model reads it: ``1 x 4: 10 x 16`` is one stage of 16."""
    stages = ", ".join(f"{len(row.layers)} x {len(row.devices)}" for row in plan.stages)
    return f"{degree} x {plan.job.samples_per_microbatch}: {stages}"


def section(options: argparse.Namespace) -> Result:
    """Metis on its own profile, both judges."""
    folder, figures = options.published / "metis", json.loads(FIGURES.read_text())
    found = []
    for degree in DEGREES:
        for samples in SAMPLES:
            result = solve(problem(folder, degree, samples), time_limit_s=options.seconds)
            found.append((result.iteration_time_s, result.lower_bound_s, degree, result.plan))
    ours_s, _, degree, ours = min(found, key=lambda row: row[0])
    bound_s = min(row[1] for row in found)
    best = problem(folder, figures["degree"], figures["samples"])
    theirs = adopt(best, [list(best.graph.layers)], replicas=DEVICES // figures["degree"])
    their_s, costs = theirs.predicted.iteration_time_s, figures["cost_s"]
    shapes = shape_of(theirs, figures["degree"]), shape_of(ours, degree)
    row: Row = {
        "their plan": shapes[0],
        "our plan": shapes[1],
        "theirs, s": their_s,
        "ours, s": ours_s,
        "theirs / ours": their_s / ours_s,
        "bound, s": bound_s,
        "Metis's cost model: its plan, s": costs.get(shapes[0]),
        "Metis's cost model: ours, s": costs.get(shapes[1]),
    }
    return judged([row])
