"""The weights of real trainings after each step, and the held-out loss of the pipelines' mean."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.sync.model import held_out_loss

PATIENCE_S = 120.0
"""The first rank waits so long for the files of those that end later."""


class Watched:
    """The weights of this rank's part of its pipeline, when training began and after each step.

    Args:
        momentum: of the optimizer.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._parameters: dict[str, nn.Parameter] = {}
        self._ends_s: list[float] = []
        self._weights: list[np.ndarray] = []

    def optimizer(
        self, parameters: Iterable[tuple[str, nn.Parameter]], lr: float
    ) -> torch.optim.Optimizer:
        """Return stochastic gradient descent with momentum.

        The first call has the pipeline's own parameters, a further one those that it serves to
        others.
        """
        named = dict(parameters)
        if not self._parameters:
            self._parameters = named
            self.look(0.0)
        return torch.optim.SGD(list(named.values()), lr=lr, momentum=self._momentum, fused=True)

    def look(self, end_s: float) -> None:
        """Note the weights at the end of a step."""
        self._ends_s.append(end_s)
        flat = [p.detach().flatten() for p in self._parameters.values()]
        self._weights.append(torch.cat(flat).numpy())

    def save(self, folder: Path, name: str, rank: int) -> None:
        """Write them to a file that is there only when it is whole."""
        path = _path(folder, name, rank)
        growing = path.with_suffix(".part.npz")
        arrays = {"ends_s": self._ends_s, "weights": self._weights, "names": [*self._parameters]}
        np.savez(growing, **{key: np.array(rows) for key, rows in arrays.items()})
        growing.rename(path)


def mean_losses(
    folder: Path, name: str, model: nn.Module, size: tuple[int, int], pipelines: int
) -> list[tuple[float, int, float]]:
    """Return the moment, the steps done by then, and the held-out loss of the mean model.

    A look is after as many steps as there are pipelines. Each pipeline has the weights of its last
    step then. The files are removed.

    Args:
        folder: of the files.
        name: of the training.
        model: that was trained, whose weights are overwritten.
        size: ranks, and ranks of a pipeline.
        pipelines: that count: the first one where all run in step.
    """
    ranks, places = size
    paths = [_path(folder, name, rank) for rank in range(ranks)]
    _wait_for(paths)
    rows = [dict(np.load(path)) for path in paths[: pipelines * places]]
    for path in paths:
        path.unlink()
    ends_s = sorted(end_s for row in rows[::places] for end_s in row["ends_s"][1:])
    shapes = dict(model.named_parameters())
    held = [[shapes[str(key)] for key in row["names"]] for row in rows]
    looks = []
    for steps in range(pipelines, len(ends_s) + 1, pipelines):
        at_s = ends_s[steps - 1]
        for parameter in shapes.values():
            parameter.data.zero_()
        for row, parameters in zip(rows, held, strict=True):
            flat = torch.from_numpy(row["weights"][bisect_right(row["ends_s"], at_s) - 1])
            parts = flat.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data.add_(part.view_as(parameter), alpha=1 / pipelines)
        looks.append((at_s, steps, held_out_loss(model)))
    return looks


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.weights.npz"


def _wait_for(paths: Iterable[Path]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{path} is not there after {PATIENCE_S:g} s")
            time.sleep(0.01)
