"""One rank that emulates a plan with one strategy after the other: see test_emulated_pipelines.py.

``emulated_worker.py PLAN FOLDER``: the first rank of each pipeline writes its losses and times.
"""

import json
import os
import sys
from pathlib import Path

from executor.emulation.pace import Pace
from executor.launch.run import RunSettings
from executor.training.training import run_emulation
from planner.plan.plan import Plan

STRATEGIES = (
    "parameter_server",
    "parameter_server:mode=async",
    "eager_parameter_server",
    "wave_synchronous",
    "ad_psgd",
    "ad_psgd:pairs=matching",
    "partial_all_reduce:group_size=2",
    "semi_decentralized",
    "semi_decentralized:overlap=true",
)
STEPS = 3


def main(plan: Plan, folder: Path) -> None:
    for number, sync in enumerate(STRATEGIES):
        history = run_emulation(plan, STEPS, RunSettings(sync=sync, pace=Pace({1: 2.0})))
        times = [metrics.step_time_s for metrics in history]
        (folder / f"{number}.{os.environ['RANK']}").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Plan.load(sys.argv[1]), Path(sys.argv[2]))
