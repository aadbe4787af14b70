"""Whether stages keep to the freedoms of a job and to the rules of its user, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster.cluster import node_of
from planner.plan.kept_rules import devices_for
from planner.plan.problem import Problem
from planner.program.compiled import compiled, header, items, pointer_at
from planner.program.lower.gradient_tables import GRADIENTS, TIED, TIED_START, TIED_USERS
from planner.search.walk.block import begin_of, device_of, end_of, replica_of, replicas_in
from planner.search.walk.memory import (
    ALLOWED_LAYERS,
    ANY,
    APART,
    GROUP_DEVICES,
    HELD,
    LOOP,
    LOOP_OR_V,
    MAY_CUT,
    NODE_OF,
    PRICE,
    UNLINKED,
    WALK,
)


class Freedoms(NamedTuple):
    """The stages that plans may have; fields are named as in :mod:`planner.search.walk.memory`.

    N layers, D devices; ``least_equal`` is the least number of equal pipelines, 0: of any replicas.
    """

    may_cut: NDArray[np.bool_]
    allowed_layers: NDArray[np.int64]
    apart: NDArray[np.bool_]
    unlinked: NDArray[np.bool_]
    class_of: NDArray[np.int64]
    place_of: NDArray[np.int64]
    node_of: NDArray[np.int64]
    price: NDArray[np.float64]
    min_stages: int
    max_stages: int
    most_on_device: int
    replicates: bool
    least_equal: int
    placement: int
    microbatches: int
    most_nodes: int
    most_price: float


def freedoms_of(problem: Problem) -> Freedoms:
    """Return what a problem's job and its rules allow."""
    job, cluster, rules = problem.job, problem.cluster, problem.job.rules
    layers, devices = problem.graph.record.layers, cluster.devices
    names = [layer.name for layer in layers]
    may_cut = np.array([job.cuts is None or name in set(job.cuts) for name in names] + [True])
    may_cut[0] = True
    for row in rules.together:
        held = sorted(names.index(name) for name in row)
        may_cut[held[0] + 1 : held[-1] + 1] = False
    of_layer = [devices_for(name, rules, cluster) for name in names]
    may_hold = [
        [
            row.may_run_on(d.type) and d.name in may
            for row, may in zip(layers, of_layer, strict=True)
        ]
        for d in devices
    ]
    count = len(devices)
    allowed = np.zeros((count, len(names) + 1), np.int64)
    allowed[:, 1:] = np.cumsum(may_hold, axis=1)
    types = list(dict.fromkeys(device.type for device in devices))
    nodes = list(dict.fromkeys(map(node_of, cluster.device_names)))
    pieces = int(may_cut.sum()) - 1
    limit = rules.most_price_per_hour
    return Freedoms(
        may_cut=may_cut,
        allowed_layers=allowed,
        apart=_apart(problem),
        unlinked=_unlinked(problem),
        class_of=np.array([types.index(device.type) for device in devices]),
        place_of=places_of(problem)[-1],
        node_of=np.array([nodes.index(node_of(name)) for name in cluster.device_names]),
        price=np.array([cluster.prices_per_hour[name] or 0.0 for name in cluster.device_names]),
        min_stages=job.min_stages,
        max_stages=min(job.max_stages or pieces, pieces, count * job.max_stages_per_device),
        most_on_device=job.max_stages_per_device,
        replicates=job.replication,
        least_equal=problem.least_pipelines if job.has_pipelines else 0,
        placement={"any": ANY, "loop_or_v": LOOP_OR_V, "loop": LOOP}[job.placement],
        microbatches=job.microbatches,
        most_nodes=rules.most_nodes or count,
        most_price=np.inf if limit is None else limit * (1 + 1e-9),
    )


def _apart(problem: Problem) -> NDArray[np.bool_]:
    """Return which devices may not hold the same stage: by rules, or as nothing joins them."""
    numbers = problem.cluster.numbers
    rows = [[numbers[name] for name in row] for row in problem.job.rules.apart]
    unlinked = _unlinked(problem)
    reduces = any(row.trainable for row in problem.graph.record.parameters)
    if not rows and not (reduces and unlinked.size):
        return np.zeros((0, 0), np.bool_)
    found = np.zeros((len(numbers), len(numbers)), np.bool_)
    if reduces and unlinked.size:
        found |= unlinked
    for row in rows:
        found[np.ix_(row, row)] = True
    return found


def _unlinked(problem: Problem) -> NDArray[np.bool_]:
    """Return which devices no path joins, D x D; empty if all are joined."""
    found: NDArray[np.bool_] = ~np.isfinite(problem.cluster.link_table.latency_s)
    return found if found.any() else np.zeros((0, 0), np.bool_)


def places_of(problem: Problem) -> list[NDArray[np.int64]]:
    """Return the groups of devices that are nearer to each other than to the rest, by number.

    Those that wide links join, where there are some, then those at the same switches.
    """
    cluster = problem.cluster
    found = []
    by_links = cluster.link_table.groups
    if by_links is not None:
        found.append(np.asarray(by_links, dtype=np.int64))
    numbers: dict[frozenset[str], int] = {}
    switches = frozenset(cluster.switches)
    attached = [switches.intersection(cluster.graph[name]) for name in cluster.device_names]
    rows = [numbers.setdefault(switch, len(numbers)) for switch in attached]
    return [*found, np.array(rows, dtype=np.int64)]


@compiled
def is_allowed(x: Any, w: Any) -> bool:
    """Return whether the stages of a block keep to the freedoms and rules."""
    h, held = header(w, WALK), items(w, HELD)
    if x[0] < h.min_stages or x[0] > h.max_stages or end_of(x, x[0] - 1) != h.layers:
        return False
    for s in range(x[0]):
        if not _is_stage_allowed(x, s, w):
            return False
    if h.least_equal and not _are_equal(x, h):
        return False
    if h.placement != ANY and not _is_placed(x, h.placement):
        return False
    found = True
    for r in range(x[1]):
        held[device_of(x, r)] += 1
        found = found and held[device_of(x, r)] <= h.most_on_device
    found = found and (not h.has_rules or _keeps_rules(w))
    found = found and (not h.has_sizes or _has_equal_groups(x, w))
    for r in range(x[1]):
        held[device_of(x, r)] = 0
    return found


@compiled
def _is_stage_allowed(x: Any, s: int, w: Any) -> bool:
    h, begin, end, first = header(w, WALK), begin_of(x, s), end_of(x, s), replica_of(x, s)
    count, allowed, apart = replicas_in(x, s), items(w, ALLOWED_LAYERS), items(w, APART)
    if begin >= end or end > h.layers or count < 1 or not items(w, MAY_CUT)[end]:
        return False
    if count > 1 and not h.replicates:
        return False
    for r in range(first, first + count):
        device = device_of(x, r)
        row = device * (h.layers + 1)
        if allowed[row + end] - allowed[row + begin] < end - begin:
            return False
        for other in range(first, r if h.has_apart else first):
            if apart[device * h.devices + device_of(x, other)]:
                return False
        if s > 0 and h.has_unlinked:
            for other in range(replica_of(x, s - 1), first):
                if items(w, UNLINKED)[device * h.devices + device_of(x, other)]:
                    return False
    return True


@compiled
def _are_equal(x: Any, h: Any) -> bool:
    """Return whether stages have as many replicas each, on equal or on disjoint sets of devices."""
    count = replicas_in(x, 0)
    if count < h.least_equal or h.microbatches % count != 0:
        return False
    for s in range(1, x[0]):
        if replicas_in(x, s) != count:
            return False
        for other in range(s if h.most_on_device > 1 else 0):
            if not _are_same(x, s, other) and not _are_disjoint(x, s, other):
                return False
    return True


@compiled
def _are_same(x: Any, s: int, other: int) -> bool:
    """Return whether two stages are on the same devices, in the same order."""
    count, first, second = replicas_in(x, s), replica_of(x, s), replica_of(x, other)
    if replicas_in(x, other) != count:
        return False
    for i in range(count):
        if device_of(x, first + i) != device_of(x, second + i):
            return False
    return True


@compiled
def _are_disjoint(x: Any, s: int, other: int) -> bool:
    for r in range(replica_of(x, s), replica_of(x, s + 1)):
        for q in range(replica_of(x, other), replica_of(x, other + 1)):
            if device_of(x, r) == device_of(x, q):
                return False
    return True


@compiled
def _is_placed(x: Any, placement: int) -> bool:
    """Return whether stages go round their devices, or where that is allowed down and up again."""
    count, length = x[0], 0
    for s in range(count):
        length += 1
        for before in range(s):
            if _are_same(x, s, before):
                length -= 1
                break
    is_loop = count % length == 0 and (length > 1 or count == 1)
    for s in range(length, count):
        is_loop = is_loop and _are_same(x, s, s - length)
    if is_loop or placement == LOOP:
        return is_loop
    if count % 2 or count < 4:
        return False
    for s in range(count // 2):
        if not _are_same(x, s, count - 1 - s):
            return False
        for before in range(s):
            if _are_same(x, s, before):
                return False
    return True


@compiled
def _has_equal_groups(x: Any, w: Any) -> bool:
    """Return whether each stage, and those that share a parameter, have groups of one size."""
    size_of, gradients = items(w, GROUP_DEVICES), pointer_at(header(w, WALK).gradients, GRADIENTS)
    for s in range(x[0]):
        size = size_of[device_of(x, replica_of(x, s))]
        for r in range(replica_of(x, s) + 1, replica_of(x, s + 1)):
            if size_of[device_of(x, r)] != size:
                return False
    start, users = items(gradients, TIED_START), items(gradients, TIED_USERS)
    for n in range(header(gradients, GRADIENTS).tied_rows):
        parameter, size = items(gradients, TIED)[n], -1
        for at in range(start[parameter], start[parameter + 1]):
            s = 0
            while end_of(x, s) <= users[at]:
                s += 1
            other = size_of[device_of(x, replica_of(x, s))]
            if size >= 0 and size != other:
                return False
            size = other
    return True


@compiled
def _keeps_rules(w: Any) -> bool:
    """Return whether the devices in use keep to a number of nodes and to a price."""
    h, held, nodes_of = header(w, WALK), items(w, HELD), items(w, NODE_OF)
    nodes, price = 0, 0.0
    for device in range(h.devices):
        if held[device] == 0:
            continue
        price += items(w, PRICE)[device]
        is_first = 1
        for other in range(device):
            if held[other] and nodes_of[other] == nodes_of[device]:
                is_first = 0
                break
        nodes += is_first
    return nodes <= h.most_nodes and price <= h.most_price
