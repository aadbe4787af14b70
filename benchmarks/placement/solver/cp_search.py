"""CP-SAT search for placements, starting from the best known one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ortools.sat.python import cp_model

from benchmarks.placement.solver.blocks import Blocks
from benchmarks.placement.solver.bounds import unplaceable
from benchmarks.placement.solver.cp_model import PlacementModel
from benchmarks.placement.solver.incumbent import Incumbent
from benchmarks.placement.solver.one_device import one_device_bound
from benchmarks.placement.solver.reduction import joined_below, joined_followers
from benchmarks.placement.solver.separation import destructive_bound, tightened
from planner.search.budget import Clock, Settings, run_solver

Order = Literal["longest", "crowd"]
FIRST_ROUNDS: tuple[Order, ...] = ("longest", "crowd")
"""The names of like devices in searches that are short: most problems need no more."""
FIRST_SHARE, BOUND_SHARE = 0.1, 0.3
"""Shares of the time left for each search, and for a bound if they prove nothing."""
MOST_CUT_BLOCKS = 1500
"""Most blocks for which minimum cuts are quick enough."""


def search(blocks: Blocks, best: Incumbent, settings: Settings, clock: Clock) -> None:
    """Improve the best placement, and the bound, until the clock ends it."""
    is_small = blocks.size <= MOST_CUT_BLOCKS
    if is_small:
        best.raise_bound(destructive_bound(blocks, best.bound, best.value, clock))
    for order in FIRST_ROUNDS:
        if _goes_on(best, clock):
            _search_once(blocks, best, settings, clock, order, FIRST_SHARE * clock.left_s)
    if is_small and _goes_on(best, clock):
        limit_s = BOUND_SHARE * clock.left_s
        bound = one_device_bound(blocks, best.bound, best.value, settings, clock, limit_s)
        best.raise_bound(bound)
    if _goes_on(best, clock):
        _search_once(blocks, best, settings, clock, "longest", clock.left_s)


def _goes_on(best: Incumbent, clock: Clock) -> bool:
    return not best.is_proved and clock.left_s > 0


def _search_once(
    blocks: Blocks,
    best: Incumbent,
    settings: Settings,
    clock: Clock,
    order: Order,
    limit_s: float,
) -> None:
    """One search with CP-SAT.

    Args:
        blocks: the problem; with precedences the devices are stages.
        best: takes what is found.
        settings: of CP-SAT.
        clock: books the time.
        order: of like devices, see :class:`PlacementModel`.
        limit_s: when to stop.
    """
    most = best.value
    reduces = tightened if blocks.size <= MOST_CUT_BLOCKS else _quickly_tightened
    joined = reduces(blocks, most, clock)
    if joined is None:
        best.raise_bound(most + 1)
        return
    reduced = joined_followers(joined, most)
    placement = PlacementModel(reduced, best.bound, most, order)
    known = best.devices
    if known is not None:
        placement.hint(*_as_stages(reduced, _on_reduced(blocks, reduced, known)))
    solver = settings.solver(min(limit_s, clock.left_s))
    solver.best_bound_callback = lambda bound: best.raise_bound(round(bound))
    status = run_solver(solver, placement.model, clock, _Callback(placement, reduced, best))
    if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
        best.raise_bound(best.value)


def _quickly_tightened(blocks: Blocks, most: int, _: Clock) -> Blocks | None:
    joined = joined_below(blocks, most)
    return None if unplaceable(joined, most) else joined


class _Callback(cp_model.CpSolverSolutionCallback):
    """Offers every placement found."""

    def __init__(self, placement: PlacementModel, blocks: Blocks, best: Incumbent) -> None:
        super().__init__()
        self._placement, self._blocks, self._best = placement, blocks, best

    def on_solution_callback(self) -> None:
        """Called by CP-SAT."""
        stages = [
            next(device for device, literal in enumerate(row) if self.boolean_value(literal))
            for row in self._placement.on
        ]
        classes = [
            next(n for n, literal in enumerate(row) if literal is True or self._holds(literal))
            for row in self._placement.is_class
        ]
        device = _numbered(self._blocks, classes)
        self._best.offer([device[stage] for stage in stages], self._blocks)

    def _holds(self, literal: cp_model.IntVar | bool) -> bool:
        return not isinstance(literal, bool) and self.boolean_value(literal)


def _numbered(blocks: Blocks, classes: Sequence[int]) -> list[int]:
    """The device of each stage, from the stages' classes: devices are numbered class by class."""
    free = []
    start = 0
    for kind in blocks.classes:
        free.append(start)
        start += kind.count
    devices = []
    for number in classes:
        devices.append(free[number])
        free[number] += 1
    return devices


def _on_reduced(blocks: Blocks, reduced: Blocks, devices: Sequence[int]) -> list[int]:
    """The placement on joined blocks: where the longest of the joined blocks was."""
    of_node = blocks.spread(devices)
    time = {}
    for block, members in enumerate(blocks.members):
        time[members[0]] = max(row[block] for row in blocks.times)
    return [
        of_node[max(members, key=lambda node: time.get(node, -1))] for members in reduced.members
    ]


def _as_stages(blocks: Blocks, devices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Stages in order with their classes, from devices numbered class by class."""
    classes = [n for n, kind in enumerate(blocks.classes) for _ in range(kind.count)]
    if not blocks.precedences:
        return list(devices), classes
    order = stage_sequence(blocks, devices, len(classes))
    position = {device: stage for stage, device in enumerate(order)}
    return [position[device] for device in devices], [classes[device] for device in order]


def stage_sequence(blocks: Blocks, devices: Sequence[int], count: int) -> list[int]:
    """The devices so that no precedence leads back; those on a circle come in any order."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(
        (devices[a], devices[b]) for a, b in blocks.precedences if devices[a] != devices[b]
    )
    condensed = nx.condensation(graph)
    return [
        device
        for part in nx.lexicographical_topological_sort(condensed)
        for device in sorted(condensed.nodes[part]["members"])
    ]
