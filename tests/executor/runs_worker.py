"""One rank of many trainings, one after the other in one process group, to save their starts.

``torchrun runs_worker.py FOLDER``: for each ``FOLDER/NAME.toml`` in order of name, a training by
``FOLDER/NAME.json``, with the arguments of :class:`RunSettings` in ``FOLDER/NAME.run``. The first
rank
writes its losses and the like to ``FOLDER/NAME.history``; checkpoints go where the file says.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist

from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.training.training import run_training
from planner.errors import PipeplanError
from planner.plan.plan import Plan


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for path in sorted(folder.glob("*.toml")):
        found = run(path)
        if dist.get_rank() == 0:
            path.with_suffix(".history").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(path: Path) -> list[dict] | str:
    plan, config = Plan.load(path.with_suffix(".json")), TrainingConfig.load(path)
    arguments = json.loads(path.with_suffix(".run").read_text())
    try:
        history = run_training(plan, config, RunSettings(**arguments))
    except PipeplanError as error:
        return str(error)
    return [dataclasses.asdict(metrics) for metrics in history]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
