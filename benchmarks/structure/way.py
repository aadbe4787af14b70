"""The files of the executor on a microbatch's way, found by training a tiny model.

Four processes train a GPT by a plan with several stages, one of them replicated: microbatches pass
between stages and gradients between replicas. The way is what the iterations of all four ranks
pass through (:class:`benchmarks.structure.entered.EnteredFiles`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from planner import Cluster, Job, ModelSource, Plan, Problem, solve, trace
from planner.space import Backward

MODEL = "models.gpt:gpt_tiny"
DEVICES = 4
STEPS = 3
SLOW_GB_PER_S = 0.2
"""Bandwidth of the link between the two pairs of devices: slow enough for a pipeline across it."""


def files_on_the_way(root: Path, backward: Backward) -> list[str]:
    """Return the files of executor/ that a microbatch passes, relative to that folder.

    Args:
        root: the repository, of which the executor and the models are run.
        backward: the kind of all backwards of the plan.

    Raises:
        RuntimeError: if the training fails; with its last lines.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan.json"
        make_plan(backward).save(plan)
        _train(root, folder, plan)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(DEVICES)]
    return sorted({path for files in found for path in files})


def make_plan(backward: Backward) -> Plan:
    """Return a plan with more than one stage, one of them replicated.

    Raises:
        RuntimeError: if the solver finds one of another shape to be faster.
    """
    job = Job(
        samples_per_microbatch=1,
        microbatches=4,
        precision="float32",
        optimizer="adamw",
        backward=backward,
    )
    problem = Problem(trace(MODEL, job), _cluster(), job, ModelSource(MODEL, {}))
    plan = solve(problem, time_limit_s=5.0, deterministic=True).plan
    replicas = [len(stage.devices) for stage in plan.stages]
    if len(replicas) < 2 or max(replicas) < 2 or sum(replicas) != DEVICES:
        raise RuntimeError(
            f"the plan has stages of {replicas} replicas, which is no longer a pipeline with a "
            f"replicated stage on {DEVICES} devices; adapt the cluster in {__file__}"
        )
    return plan


def _cluster() -> Cluster:
    """Return two pairs of devices with a slow link in between."""
    names = [f"d{index}" for index in range(DEVICES)]
    hubs = ["left", "right"]
    kind = {
        "memory_gib": 1,
        "reserved_gib": 0,
        "memory_bandwidth_gb_per_s": 10,
        "peak_tflop_per_s": {"float32": 0.1},
    }
    near: list[dict[str, Any]] = [
        {"between": [name, hubs[2 * index // DEVICES]], "bandwidth_gb_per_s": 10}
        for index, name in enumerate(names)
    ]
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "two pairs",
            "device_types": {"unit": kind},
            "devices": [{"name": name, "type": "unit"} for name in names],
            "switches": hubs,
            "links": [*near, {"between": hubs, "bandwidth_gb_per_s": SLOW_GB_PER_S}],
        }
    )


def _train(root: Path, folder: Path, plan: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(DEVICES)]
    rank = ["-m", "benchmarks.structure.watched_rank", str(folder), str(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-m", *torchrun, *rank, "--steps", str(STEPS)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"the training failed:\n{run.stderr[-4000:]}")
