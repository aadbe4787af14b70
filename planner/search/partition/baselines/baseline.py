"""The interface of the baselines, and the machines of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

from planner.cluster.cluster import Cluster
from planner.errors import InfeasibleError
from planner.search.partition.chain import Chain, FloatArray, IntArray, Partition

Plan = Callable[[Chain], Partition]


class Baseline(NamedTuple):
    """A published way to cut a chain of layers into stages and put them on devices.

    Attributes:
        name: as ``pipeplan compare --planners`` takes it.
        source: where it was published.
        plan: the method; one stage a device, within the job's ``max_stages`` and ``replication``.
            Raises InfeasibleError, with the reason, where the method finds nothing that fits.
        quick_plan: tries fewer numbers of replicas where there are many devices, for searches that
            take the result as a starting point; None: there is no such form.
        all_plans: everything that the method tries where it schedules all of it; None: it chooses
            before.
    """

    name: str
    source: str
    plan: Plan
    quick_plan: Plan | None = None
    all_plans: Callable[[Chain], Iterator[Partition]] | None = None

    def partitions(self, chain: Chain) -> list[Partition]:
        """Return everything that the method schedules, of most one partition.

        Args:
            chain: the layers.

        Raises:
            InfeasibleError: if the method finds nothing that fits, with recomputation or without.
        """
        return [self.partition(chain)] if self.all_plans is None else [*self.all_plans(chain)]

    def partition(self, chain: Chain, *, quick: bool = False) -> Partition:
        """Return what the method chooses; if it finds nothing that fits, with recomputation.

        None of the methods decides about recomputation. Their users turn it on for all layers where
        memory is short, if the job allows it; schedules recompute no more than they need then.

        Args:
            chain: the layers.
            quick: take the quick form.

        Raises:
            InfeasibleError: if the method finds nothing that fits either way.
        """
        plan = (quick and self.quick_plan) or self.plan
        try:
            return plan(chain)
        except InfeasibleError:
            if not chain.problem.job.recompute:
                raise
            return plan(_RecomputedChain(chain.problem))


class _RecomputedChain(Chain):
    """The layers of a problem, all of which run again in the backward."""

    @cached_property
    def stash_bytes(self) -> IntArray:
        """What each layer starts again from."""
        return self.stashes.kept_bytes

    def backward_s(self, device_type: str) -> FloatArray:
        """Return backward seconds of each layer, its second forward included."""
        return super().backward_s(device_type) + self.again_s(device_type)


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
    return tuple(tuple(group) for group in groups.values())


def equal_machines(cluster: Cluster) -> tuple[tuple[str, ...], ...] | None:
    """Return the machines if there are several, all of one size above 1 and of one device type."""
    found = machines(cluster)
    sizes = {len(machine) for machine in found}
    types = {cluster.type_of(device) for device in cluster.device_names}
    if len(found) < 2 or len(sizes) > 1 or sizes == {1} or len(types) > 1:
        return None
    return found
