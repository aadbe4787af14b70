"""One rank of many trainings, one after the other: ``torchrun -m benchmarks.sync.worker FOLDER``.

The folder holds the plan and ``jobs.json``, a list of :class:`benchmarks.sync.real.Training` as
dictionaries. Each rank writes ``NAME.RANK.json`` with the ends of its steps; the first one adds the
held-out losses of the pipelines' mean model while they trained, and of the model that the training
led to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.sync.model import held_out_loss
from executor.checkpoint.read import Checkpoint
from executor.emulation.pace import Pace
from executor.launch.config import TrainingConfig
from executor.launch.run import RunSettings
from executor.training.loop import StepMetrics
from executor.training.optimizer import MOMENTUM
from executor.training.training import run_training
from planner.plan.plan import Plan
from planner.tracing.factory import import_factory

_LAST_ONLY = 2**62
"""No step has this number: only the end of the training is saved."""
PATIENCE_S = 120.0
"""The first rank waits so long for the files of those that end later."""


def main(folder: Path) -> None:
    """Run all of them."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for job in json.loads((folder / "jobs.json").read_text()):
        if rank == 0:
            print(f"[{time.strftime('%H:%M:%S')}] {job}", file=sys.stderr, flush=True)
        found = _train(folder, job, rank)
        (folder / f"{job['name']}.{rank}.json").write_text(json.dumps(found))


def _train(folder: Path, job: dict[str, Any], rank: int) -> dict[str, Any]:
    plan, setting = Plan.load(folder / "plan.json"), job["setting"]
    saved = folder / f"{job['name']}.saved"
    data: dict[str, Any] = {
        "steps": job["steps"],
        "seed": job["seed"],
        "data": "benchmarks.sync.model:taught",
        "data_arguments": {"seed": job["seed"]},
        "learning_rate": job["learning_rate"],
        "checkpoint": {"folder": str(saved), "every": _LAST_ONLY},
    }
    assert plan.model.factory is not None
    model = import_factory(plan.model.factory)(**plan.model.arguments)
    watched = Watched({name: parameter.shape for name, parameter in model.named_parameters()})
    slow = {int(name): factor for name, factor in setting["slow"].items()}
    run = RunSettings(
        model=plan.model.factory,
        sync=job["sync"],
        pace=Pace(slow, setting["sleep_probability"], setting["sleep_s"], job["seed"]),
        optimizer=watched.optimizer,
    )
    rows: list[tuple[float, float]] = []

    def report(metrics: StepMetrics) -> None:
        end_s = time.time()
        rows.append((end_s, metrics.step_time_s))
        watched.look(end_s)

    run_training(plan, TrainingConfig.parse(data, job["name"]), run, report)
    watched.save(folder, job["name"], rank)
    found: dict[str, Any] = {"rows": rows}
    if rank == 0:
        pipelines = 1 if job["in_step"] else len(plan.ranks)
        found["looks"] = _mean_losses(folder, job["name"], model, len(plan.ranks), pipelines)
        targets = {f"parameters/{name}": p.data for name, p in model.named_parameters()}
        Checkpoint.open(saved).read_into(targets)
        found["held_out_loss"] = held_out_loss(model)
    return found


class Watched:
    """The weights of this rank's pipeline, when training began and after each step.

    Args:
        shapes: of the model's parameters; the executor tries an optimizer on smaller ones first.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self._parameters: dict[str, nn.Parameter] = {}
        self._ends_s: list[float] = []
        self._weights: list[np.ndarray] = []

    def optimizer(
        self, parameters: Iterable[tuple[str, nn.Parameter]], lr: float
    ) -> torch.optim.Optimizer:
        """Return stochastic gradient descent with momentum.

        The first call with the model's shapes has the pipeline's own parameters, a further one
        those that it serves to others.
        """
        named = dict(parameters)
        is_model = all(parameter.shape == self._shapes[name] for name, parameter in named.items())
        if is_model and not self._parameters:
            self._parameters = named
            self.look(0.0)
        return torch.optim.SGD(list(named.values()), lr=lr, momentum=MOMENTUM, fused=True)

    def look(self, end_s: float) -> None:
        """Note the weights at the end of a step."""
        self._ends_s.append(end_s)
        flat = [p.detach().flatten() for p in self._parameters.values()]
        self._weights.append(torch.cat(flat).numpy())

    def save(self, folder: Path, name: str, rank: int) -> None:
        """Write them to a file that exists only when it is whole."""
        path = _path(folder, name, rank)
        growing = path.with_suffix(".part.npz")
        arrays = {"ends_s": self._ends_s, "weights": self._weights, "names": [*self._parameters]}
        np.savez(growing, **{key: np.array(rows) for key, rows in arrays.items()})
        growing.rename(path)


def _mean_losses(
    folder: Path, name: str, model: nn.Module, ranks: int, pipelines: int
) -> list[tuple[float, int, float]]:
    """Return the moment, the steps done by then, and the held-out loss of the mean model.

    A look is after as many steps as there are pipelines. Each pipeline has the weights of its last
    step then. The files are removed.

    Args:
        folder: of the files.
        name: of the training.
        model: that was trained, whose weights are overwritten.
        ranks: their number.
        pipelines: that count: the first one where all run in step.
    """
    paths = [_path(folder, name, rank) for rank in range(ranks)]
    _wait_for(paths)
    rows = [dict(np.load(path)) for path in paths[:pipelines]]
    for path in paths:
        path.unlink()
    ends_s = sorted(end_s for row in rows for end_s in row["ends_s"][1:])
    shapes = dict(model.named_parameters())
    looks = []
    for steps in range(pipelines, len(ends_s) + 1, pipelines):
        at_s = ends_s[steps - 1]
        last = [row["weights"][bisect_right(row["ends_s"], at_s) - 1] for row in rows]
        held = [shapes[str(key)] for key in rows[0]["names"]]
        parts = torch.from_numpy(np.mean(last, axis=0)).split([p.numel() for p in held])
        for parameter, part in zip(held, parts, strict=True):
            parameter.data.copy_(part.view_as(parameter))
        looks.append((at_s, steps, held_out_loss(model)))
    return looks


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.weights.npz"


def _wait_for(paths: Iterable[Path]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{path} does not exist after {PATIENCE_S:g} s")
            time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
