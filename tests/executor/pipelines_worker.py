"""One rank of many trainings, one after the other: see ``tests/executor/runs_worker.py``.

Here every training makes its own process groups, one a pipeline.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.training.training import run_training
from planner.plan.plan import Plan


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.toml")):
        plan, config = Plan.load(path.with_suffix(".json")), TrainingConfig.load(path)
        arguments = json.loads(path.with_suffix(".run").read_text())
        history = run_training(plan, config, RunSettings(**arguments))
        rows = [asdict(metrics) for metrics in history]
        path.with_suffix(f".{os.environ['RANK']}.history").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
