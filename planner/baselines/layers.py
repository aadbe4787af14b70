"""What a baseline knows of a problem, what it answers, and the machines of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import Cluster
from planner.costs.gradients import least_reduced_bytes
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import has_equal_groups
from planner.costs.stage_table import StageTable
from planner.errors import InfeasibleError
from planner.plan.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Stage(NamedTuple):
    """The layers from ``begin`` up to ``end``, on devices by name."""

    begin: int
    end: int
    devices: tuple[str, ...]


Stages = tuple[Stage, ...]


@dataclass(frozen=True)
class Layers:
    """The layers of a problem in a row, with their figures on each of the K device types.

    Attributes:
        table: of the problem.
        recomputes: whether every layer runs again in the backward.
    """

    table: StageTable
    recomputes: bool = False

    @property
    def problem(self) -> Problem:
        """The model, cluster and job."""
        return self.table.problem

    @property
    def length(self) -> int:
        """Number of layers, N."""
        return len(self.table.layers)

    @property
    def max_stages(self) -> int:
        """The most stages with one stage a device."""
        most = min(self.cut_limit, len(self.problem.cluster.devices))
        return min(most, self.problem.job.max_stages or most)

    @property
    def cut_limit(self) -> int:
        """The most stages that the cuts of the job allow."""
        cuts = self.problem.job.cuts
        return self.length if cuts is None else 1 + len(set(cuts) & set(self.table.layers[1:]))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The device types in use, by number."""
        used = {device.type for device in self.problem.cluster.devices}
        return tuple(kind for kind, name in enumerate(self.table.types) if name in used)

    def kind_of(self, device: str) -> int:
        """Return the number of a device's type."""
        return self.table.types.index(self.problem.cluster.type_of(device))

    @cached_property
    def forward_s(self) -> Floats:
        """Seconds of forwards, K x N."""
        forward_s: Floats = self.table.arrays.seconds[:, :, 1]
        return forward_s

    @cached_property
    def backward_s(self) -> Floats:
        """Least seconds of backwards, whole or, if allowed, split, K x N."""
        seconds = self.table.arrays.seconds
        least_s: Floats = seconds[:, :, 0].copy()
        if self.problem.job.splits:
            np.minimum(least_s, seconds[:, :, 2] + seconds[:, :, 3], out=least_s)
        if self.recomputes:
            least_s += self.table.arrays.again_s
        return least_s

    @cached_property
    def work_s(self) -> Floats:
        """Seconds of a microbatch by layer, a row for each device type in use."""
        return (self.forward_s + self.backward_s)[list(self.kinds)]

    @cached_property
    def stash_bytes(self) -> Ints:
        """Bytes that each layer keeps of a microbatch, K x N.

        Of layers that run again, the tensors that they start from: those that they saved, and those
        that nobody saved and no other layer uses.
        """
        arrays = self.table.arrays
        kept: Ints = arrays.saved_input.copy() if self.recomputes else arrays.stash
        if not self.recomputes:
            return kept
        starts = arrays.user_start
        for tensor in np.flatnonzero((arrays.saver < 0) & (np.diff(starts) == 1)):
            kept[:, arrays.user[starts[tensor]]] += arrays.tensor_bytes[:, tensor]
        return kept

    def static_bytes(self, holders: int) -> Ints:
        """Return weights, gradients and optimizer state of each layer, K x N.

        A parameter counts at the first layer that has it.

        Args:
            holders: devices that share the optimizer's state, if the job has them share it.
        """
        arrays = self.table.arrays
        share = min(holders * self.problem.copies, arrays.static.shape[1]) - 1
        first = np.flatnonzero(arrays.held_before < 0)
        of_layer = np.repeat(np.arange(self.length), np.diff(arrays.held_start))[first]
        found = np.zeros((len(self.table.types), self.length), dtype=np.int64)
        for kind, row in enumerate(found):
            np.add.at(row, of_layer, arrays.static[kind, share, arrays.held[first]])
        return found

    @cached_property
    def gradient_bytes(self) -> Ints:
        """Bytes that each layer adds to its stage's all-reduce; parameters of several left out."""
        own, job = self.problem.graph.own_parameters, self.problem.job
        rows = [own[name] for name in self.table.layers]
        return np.array([sum(least_reduced_bytes(job, p) for p in row) for row in rows])

    def specs(self, stages: Iterable[Stage]) -> tuple[StageSpec, ...]:
        """Return stages by the names of their layers."""
        names = self.table.layers
        return tuple(StageSpec(names[row.begin : row.end], row.devices) for row in stages)

    def keeps_groups(self, stages: Stages) -> bool:
        """Return whether tensor-parallel groups that hold the same parameters have one size."""
        return has_equal_groups(self.problem, self.specs(stages))

    def may_run(self, stages: Stages) -> bool:
        """Return whether all layers may run on the devices of their stages."""
        allowed = self.table.arrays.may_run
        return self.keeps_groups(stages) and all(
            allowed[self.kind_of(device), row.begin : row.end].all()
            for row in stages
            for device in row.devices
        )

    def at_cuts(self, stages: Stages) -> Stages | None:
        """Return stages with each cut at the nearest place that the job allows.

        Returns:
            None if a stage has no layers left.
        """
        if self.problem.job.cuts is None:
            return stages
        wanted = set(self.problem.job.cuts)
        inside = [n for n, name in enumerate(self.table.layers) if n and name in wanted]
        allowed = np.array([0, *inside, self.length])
        ends = [int(allowed[np.abs(allowed - row.end).argmin()]) for row in stages]
        rows = zip([0, *ends[:-1]], ends, (row.devices for row in stages), strict=True)
        found = tuple(Stage(*row) for row in rows)
        return found if all(row.begin < row.end for row in found) else None


@dataclass(frozen=True)
class Baseline:
    """A published way to cut layers into stages and put them on devices.

    Attributes:
        name: as ``pipeplan compare --planners`` takes it.
        source: where it was published.
        plan: the method; one stage a device, within the job's ``max_stages`` and ``replication``.
            Raises InfeasibleError, with the reason, where the method finds nothing that fits.
        all_plans: everything that the method tries where it schedules all of it; None: it chooses
            before.
    """

    name: str
    source: str
    plan: Callable[[Layers], Stages]
    all_plans: Callable[[Layers], Iterator[Stages]] | None = None

    def stages(self, layers: Layers) -> Iterator[Stages]:
        """Yield what the method schedules, of most methods one choice of stages.

        None of the methods decides about recomputation. Their users turn it on for all layers where
        memory is short, if the job allows it; so a method that finds nothing plans once more with
        all layers recomputed. Schedules recompute no more than they need then.

        Raises:
            InfeasibleError: if the method finds nothing that fits either way.
        """
        if self.all_plans is not None:
            yield from self.all_plans(layers)
            return
        try:
            yield self.plan(layers)
        except InfeasibleError:
            if not layers.problem.job.recompute:
                raise
            yield self.plan(replace(layers, recomputes=True))


def nothing_fits(name: str, space: str) -> InfeasibleError:
    """Return the error of a baseline that finds no stage boundaries that fit.

    Args:
        name: of the baseline.
        space: what it searched.
    """
    return InfeasibleError(
        f"{name}: none of {space} fits the devices' memory and is joined by links; use smaller "
        "microbatches, a lighter optimizer, more stages or larger devices"
    )


def in_file_order(layers: Layers, stages: Sequence[Stage]) -> Stages:
    """Return the same stages with each one's replicas in the order of the cluster file."""
    number = layers.problem.cluster.numbers.__getitem__
    return tuple(row._replace(devices=tuple(sorted(row.devices, key=number))) for row in stages)


def machines(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each switch, in file order; one on none is a machine of its own.

    A device on several switches belongs to the one with the widest link.
    """
    switches = set(cluster.switches)
    machine_of: dict[str, tuple[float, str]] = {}
    for link in cluster.links:
        for device, switch in (link.between, reversed(link.between)):
            if switch in switches and device not in switches:
                found = (link.bandwidth_gb_per_s, switch)
                machine_of[device] = max(machine_of.get(device, found), found)
    groups: dict[tuple[bool, str], list[str]] = {}
    for device in cluster.device_names:
        key = (True, machine_of[device][1]) if device in machine_of else (False, device)
        groups.setdefault(key, []).append(device)
    return tuple(map(tuple, groups.values()))


def equal_machines(cluster: Cluster) -> tuple[tuple[str, ...], ...] | None:
    """Return the machines if there are several, all of one size above 1 and of one device type."""
    found = machines(cluster)
    sizes = {len(machine) for machine in found}
    types = {device.type for device in cluster.devices}
    return found if len(found) > 1 and len(sizes) == len(types) == 1 and sizes != {1} else None
