"""The layouts that a walk starts from.

Devices are put in a few orders in which neighbours are well connected. Along each, cuts and numbers
of replicas with the shortest longest stage are found for every number of stages, and every even
grid of stages and replicas is cut; where nothing fits, stages of one device each are tried in every
order of the classes of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.program.compiled import Block
from planner.search.walk.cuts import cut_by_classes, cut_groups, cut_order, stage_needs
from planner.search.walk.freedoms import Freedoms
from planner.search.walk.memory import LOOP, TYPE_OF

MOST_UNITS, MOST_CUTS = 48, 4e8
"""Parts of an order of devices between which stages begin, and choices of a stage's layers and
parts that are compared along one: many layers are cut along fewer parts."""
MANY_DEVICES = 64
"""On more devices grids leave out a tenth of them at most, on fewer ones half."""
MOST_STATES = 1 << 25
Order = tuple[int, ...]


class Start(NamedTuple):
    """The end and the devices of each stage."""

    ends: tuple[int, ...]
    devices: tuple[Order, ...]


class Needs(NamedTuple):
    """What intervals of layers take.

    Attributes:
        seconds, limits: see :func:`planner.search.walk.cuts.stage_needs`.
        type_of: type of each device.
        work_s: seconds of a microbatch on each type, through all layers.
    """

    seconds: NDArray[np.float64]
    limits: NDArray[np.int64]
    type_of: NDArray[np.int32]
    work_s: NDArray[np.float64]


def needs_of(memory: Block, table: StageTable, freedoms: Freedoms) -> Needs:
    """Return the seconds and the least recomputation of all intervals.

    Args:
        memory: of a walk.
        table: what stages cost.
        freedoms: the stages that there may be.
    """
    kinds, layers = int(memory.numbers["types"]), int(memory.numbers["layers"])
    stages = min(freedoms.max_stages, MOST_UNITS)
    work_s = table.arrays.seconds[:, :, :2].sum(axis=(1, 2))
    shape = (stages, kinds, layers + 1, layers + 1)
    needs = Needs(np.full(shape, np.inf), np.zeros(shape, np.int64), memory[TYPE_OF].copy(), work_s)
    stage_needs(memory.header, needs.seconds, needs.limits)
    return needs


def starts(network: NetworkTable, freedoms: Freedoms, needs: Needs) -> Iterator[Start]:
    """Yield layouts of many kinds, the likeliest first; some may not keep to the freedoms."""
    found: set[Start] = set()
    for start in _all_starts(network, freedoms, needs):
        if start not in found:
            found.add(start)
            yield start


def _all_starts(network: NetworkTable, freedoms: Freedoms, needs: Needs) -> Iterator[Start]:
    # On hundreds of devices there is no time for many starts: even grids of all devices come first,
    # those of few stages before others.
    every = tuple(range(len(needs.type_of)))
    yield from reversed([*_grids(every, freedoms, needs, least=len(every))])
    goes_along = freedoms.replicates and not freedoms.least_equal and freedoms.placement != LOOP
    for order in _orders(network, freedoms, needs):
        if goes_along:
            yield from _along(order, freedoms, needs)
        least = 0.9 * len(order) if len(order) > MANY_DEVICES else 0.5 * len(order)
        yield from _grids(order, freedoms, needs, math.floor(least) + 1)


def singles(freedoms: Freedoms, needs: Needs) -> Iterator[Start]:
    """Yield a layout with one device a stage that holds a microbatch at a time, if there is one.

    Devices of one type count as alike; those that rules hold apart are not looked at.
    """
    layers = needs.seconds.shape[2] - 1
    types = np.unique(needs.type_of)
    counts = np.array([int((needs.type_of == kind).sum()) for kind in types])
    shape = math.prod(int(count) + 1 for count in counts), layers + 1
    if math.prod(shape) > MOST_STATES:
        return
    best, chosen = np.full(shape, np.inf, np.float32), np.zeros((*shape, 2), np.int16)
    ends, classes = (np.zeros(min(layers, len(needs.type_of)), np.int64) for _ in range(2))
    count = cut_by_classes(
        needs.seconds[:1], freedoms.may_cut, types, counts, best, chosen, ends, classes
    )
    left = {c: [*np.flatnonzero(needs.type_of == kind)] for c, kind in enumerate(types)}
    if count > 0:
        devices = tuple((int(left[int(c)].pop(0)),) for c in classes[:count])
        yield Start(tuple(int(end) for end in ends[:count]), devices)


# --- orders of devices ----------------------------------------------------------------------------


def _orders(network: NetworkTable, freedoms: Freedoms, needs: Needs) -> Iterator[Order]:
    """Yield orders of all devices, then of the fastest nodes or islands alone."""
    work_s = needs.work_s[needs.type_of]
    by_links = order_by_links(network.gb_per_s)
    every = [tuple(range(len(work_s))), by_links]
    every.append(tuple(sorted(by_links, key=lambda d: work_s[d])))
    place = freedoms.place_of
    speed = {p: float((1 / np.maximum(work_s[place == p], 1e-30)).sum()) for p in np.unique(place)}
    ranked = sorted(by_links, key=lambda d: (-speed[place[d]], place[d], work_s[d]))
    every.append(tuple(ranked))
    for order in dict.fromkeys(every):
        yield order
        yield order[::-1]
    fastest = [p for p, _ in sorted(speed.items(), key=lambda row: -row[1])]
    for count in range(1, len(fastest)):
        held = set(fastest[:count])
        yield tuple(d for d in by_links if place[d] in held)


def order_by_links(gb_per_s: NDArray[np.float64]) -> Order:
    """Return the devices with those together that the widest links join.

    Groups are joined in the order of the widest link between them, as minimum cuts would divide
    them again in a network that is a tree.
    """
    count = len(gb_per_s)
    groups = [[device] for device in range(count)]
    of = list(range(count))
    for width in np.unique(gb_per_s[~np.eye(count, dtype=bool)])[::-1]:
        for one, other in zip(*np.nonzero(np.triu(gb_per_s >= width, 1)), strict=True):
            first, second = sorted((of[one], of[other]))
            if first != second:
                groups[first] += groups[second]
                for device in groups[second]:
                    of[device] = first
                groups[second] = []
    return tuple(device for group in groups for device in group)


# --- stages along an order ------------------------------------------------------------------------


def _along(order: Order, freedoms: Freedoms, needs: Needs) -> Iterator[Start]:
    """Yield the best cuts and replicas for each number of stages along an order."""
    # For each of S stages an interval of N layers and one of U parts, of which there are S <= U.
    most_units = max(2, min(MOST_UNITS, int((MOST_CUTS / needs.seconds.shape[2] ** 2) ** (1 / 3))))
    size = -(-len(order) // most_units)
    units = [order[i : i + size] for i in range(0, len(order), size)]
    most = min(freedoms.max_stages, len(units), len(needs.seconds))
    kinds = needs.seconds.shape[1]
    counts = [np.bincount(needs.type_of[list(unit)], minlength=kinds) for unit in units]
    before = np.cumsum([np.zeros(kinds, np.int64), *counts], axis=0)
    shape = most + 1, needs.seconds.shape[2], len(units) + 1
    best, chosen = np.full(shape, np.inf), np.zeros((*shape, 2), np.int32)
    ends, first = np.zeros((most, most), np.int64), np.zeros((most, most), np.int64)
    longest = np.zeros(most)
    cut_order(needs.seconds, freedoms.may_cut, before, best, chosen, ends, first, longest)
    for count in range(freedoms.min_stages, most + 1):
        if longest[count - 1] < np.inf:
            begins = [*first[count - 1, :count].tolist(), len(units)]
            rows = [sum(units[a:b], ()) for a, b in pairwise(begins)]
            yield Start(tuple(ends[count - 1, :count].tolist()), tuple(rows))


# --- even grids -----------------------------------------------------------------------------------


def _grids(order: Order, freedoms: Freedoms, needs: Needs, least: int) -> Iterator[Start]:
    """Yield all grids of stages and replicas on the first devices of an order.

    Devices of a stage lie side by side, or those of a pipeline do; with several stages a device
    they go round, or down and up again.

    Args:
        order: of devices.
        freedoms: the stages that there may be.
        needs: of the stages.
        least: devices of a grid, at least; if not all, a grid without replicas may have fewer.
    """
    for width in range(1, len(order) + 1):
        most = min(len(order) // width, freedoms.max_stages)
        if width > 1 and not freedoms.replicates:
            return
        if width < freedoms.least_equal or (freedoms.least_equal and freedoms.microbatches % width):
            continue
        fewest = 1 if width == 1 and least < len(order) else -(-least // width)
        for depth in range(fewest, most + 1):
            for rows in _arranged(order, depth, width):
                for groups in _rounds(rows, freedoms):
                    yield from _cut(groups, freedoms, needs)


def _arranged(order: Order, depth: int, width: int) -> Iterator[list[Order]]:
    yield [order[s * width : (s + 1) * width] for s in range(depth)]
    if width > 1 and depth > 1:
        yield [order[s : depth * width : depth] for s in range(depth)]


def _rounds(rows: Sequence[Order], freedoms: Freedoms) -> Iterator[list[Order]]:
    """Yield the devices of stages that visit each of the rows once, or several times."""
    for rounds in range(1, freedoms.most_on_device + 1):
        if rounds * len(rows) <= freedoms.max_stages and (rounds == 1 or len(rows) > 1):
            yield [*rows] * rounds
    if freedoms.most_on_device > 1 and len(rows) > 1 and freedoms.placement != LOOP:
        yield [*rows, *rows[::-1]]


def _cut(groups: Sequence[Order], freedoms: Freedoms, needs: Needs) -> Iterator[Start]:
    if not freedoms.min_stages <= len(groups) <= freedoms.max_stages:
        return
    kinds = needs.seconds.shape[1]
    counts = np.array([np.bincount(needs.type_of[list(g)], minlength=kinds) for g in groups])
    shape = len(groups) + 1, needs.seconds.shape[2]
    best, cut = np.full(shape, np.inf), np.zeros(shape, np.int64)
    ends = np.zeros(len(groups), np.int64)
    if cut_groups(needs.seconds, freedoms.may_cut, counts, best, cut, ends) < np.inf:
        tidied = groups if freedoms.least_equal else [tuple(sorted(group)) for group in groups]
        yield Start(tuple(ends.tolist()), tuple(tidied))
