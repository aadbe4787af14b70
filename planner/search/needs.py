"""The least memory that stages need, and divisions of the layers into stages that fit.

One microbatch is in flight; what the job allows to recompute or offload is. Each part of a stage's
memory counts at its least, so that where no division exists, no plan does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.gradients import gradient_bytes
from planner.costs.optimizer import most_holders
from planner.costs.stage_table import NEVER, StageTable
from planner.model.graph_record import Parameter
from planner.plan.problem import Problem
from planner.search.walk.cuts import cut_by_classes

MOST_STATES = 1 << 25
"""Layers times numbers of devices in use of each type that divisions are looked for among."""
Ints = NDArray[np.int64]


class Stage(NamedTuple):
    """The layers from ``begin`` to ``end`` on a device of a type."""

    begin: int
    end: int
    type: str


class Needs:
    """What the stages of a problem need at least.

    Args:
        problem: whose devices stages are placed on.
        more_devices: added to the number of each type.

    Attributes:
        names: of the layers.
        bytes: K x N x (N + 1); of the layers from the first to an end, on each type.
        types: names of the K types.
    """

    def __init__(self, problem: Problem, more_devices: Mapping[str, int] | None = None) -> None:
        self.problem = problem
        table = StageTable(problem)
        self.names, self.types = table.layers, table.types
        job, more = problem.job, more_devices or {}
        kinds = [device.type for device in problem.cluster.devices]
        self.counts = {name: kinds.count(name) + more.get(name, 0) for name in self.types}
        # What a layer that does not run again adds to the stash is in its workspace if it does.
        rerun = NEVER if job.recompute else 0
        offload = NEVER if job.offload is True else 0
        rows = table.all_figures(rerun=rerun, offload=offload, holders=most_holders(problem))
        self._stash_bytes: Ints = rows["stash_bytes"] - rows["offload_bytes"]
        self._passed_bytes = _passed_bytes(table)
        held = rows["static_bytes"] + rows["workspace_bytes"]
        self.bytes: Ints = held + self._stash_bytes + self._passed_bytes
        self._may_run = rows["may_run"] > 0

    @cached_property
    def capacities(self) -> dict[str, int]:
        """Bytes of a device of each type."""
        kinds = self.problem.cluster.device_types
        return {name: kinds[name].capacity_bytes for name in self.types}

    @cached_property
    def may_cut(self) -> NDArray[np.bool_]:
        """Before which layers a stage may begin, and the end."""
        cuts = self.problem.job.cuts
        found = np.array([cuts is None or name in cuts for name in self.names] + [True])
        found[0] = True
        return found

    @property
    def places(self) -> list[int]:
        """The layers that stages may begin with, and the end."""
        return [int(place) for place in np.flatnonzero(self.may_cut)]

    @property
    def most_stages(self) -> int:
        """The largest number of stages, with one on each device."""
        most = min(len(self.places) - 1, sum(self.counts.values()))
        return min(most, self.problem.job.max_stages or most)

    def need(self, begin: int, end: int, kind: str) -> int:
        """Return the bytes that layers need on a type."""
        return int(self.bytes[self.types.index(kind), begin, end])

    def divide(self, slack_bytes: float = 0.0) -> list[Stage] | None:
        """Return stages of one device each that fit; None if there are none.

        Args:
            slack_bytes: added to every device's capacity.

        Raises:
            OverflowError: if there are too many types and devices to look at all divisions.
        """
        room = np.array([self.capacities[name] for name in self.types]) + slack_bytes
        fits = np.logical_and(self.bytes <= room[:, None, None], self._may_run)
        layers = len(self.names)
        seconds = np.full((1, len(self.types), layers + 1, layers + 1), np.inf)
        seconds[0, :, :layers] = np.where(fits, 1.0, np.inf)
        counts = np.array([self.counts[name] for name in self.types])
        shape = prod(int(count) + 1 for count in counts), layers + 1
        if prod(shape) > MOST_STATES:
            raise OverflowError("too many types and devices")
        best, chosen = np.full(shape, np.inf, np.float32), np.zeros((*shape, 2), np.int16)
        ends, classes = (np.zeros(layers, np.int64) for _ in range(2))
        kinds = np.arange(len(self.types))
        count = cut_by_classes(seconds, self.may_cut, kinds, counts, best, chosen, ends, classes)
        if not 0 < count <= self.most_stages:
            return None
        begins = [0, *ends[:count].tolist()]
        named = [self.types[c] for c in classes[:count].tolist()]
        return [Stage(a, b, kind) for (a, b), kind in zip(pairwise(begins), named, strict=True)]

    def least_overflow(self) -> tuple[float, list[Stage]]:
        """Return how much more every device would need for a division to fit, and that division."""
        over = [self.bytes[k] - self.capacities[name] for k, name in enumerate(self.types)]
        slacks = np.unique(np.maximum(np.concatenate([row.ravel() for row in over]), 0))
        low, high = 0, len(slacks) - 1
        while low < high:
            middle = (low + high) // 2
            if self.divide(float(slacks[middle])) is None:
                low = middle + 1
            else:
                high = middle
        return float(slacks[low]), self.divide(float(slacks[low])) or []

    def parts(self, stage: Stage) -> dict[str, int]:
        """Return what a stage's bytes are made of, by name."""
        problem, (begin, end, kind) = self.problem, stage
        at = self.types.index(kind), begin, end
        held = problem.graph.parameters_of(self.names[begin:end])
        trained = [row for row in held if row.trainable]
        per_element, holders = problem.job.optimizer_bytes_per_element, most_holders(problem)

        def least_bytes(row: Parameter, bytes_: int) -> int:
            return -(-bytes_ // holders) if row.name in problem.divided_parameters else bytes_

        name = "stash of one microbatch"
        if problem.job.recompute:
            name += " with all recomputed that saves memory"
        parts = {
            "weights": sum(least_bytes(row, row.bytes) for row in held),
            "gradients": sum(least_bytes(row, gradient_bytes(problem.job, row)) for row in trained),
            "optimizer state": sum(per_element * -(-row.elements // holders) for row in trained),
            name: int(self._stash_bytes[at]),
            "tensors to and from its neighbours": int(self._passed_bytes[at]),
        }
        return parts | {"workspace": int(self.bytes[at]) - sum(parts.values())}


def _passed_bytes(table: StageTable) -> Ints:
    """Return bytes that stages hold of messages beside a stash, K x N x (N + 1)."""
    into, back = table.arrays.crossing, table.arrays.crossing_gradient
    both = back[:, :-1, None] + back[:, None, :]
    found: Ints = np.maximum(into[:, None, :], both)
    return found
