"""Times of a program for other durations: longest paths, with all orders as in one replay.

Devices keep their orders, lines theirs, and what shared links takes as much longer as it is made.
So a task starts with the last of what it waits for (the longest path to it), and many durations
are tried in one call of compiled code.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.program.compiled import entry
from planner.program.program import (
    FLOW,
    LATE_FLOW,
    MAKERS,
    REPLICAS,
    STEP,
    SUCCESSORS,
    WAY_LINES,
    WAYS,
    Program,
)
from planner.program.replay import Times

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Edge = tuple[int, int, float]
"""A task, one that waits for it, and how long before its end that is free to go: at most until its
start. Infinite where the start itself is waited for."""


class Paths:
    """What waits for what in a replay.

    Args:
        program: that was replayed.
        times: of its tasks.
    """

    def __init__(self, program: Program, times: Times) -> None:
        self._program, self._times = program, times
        tasks = program.tasks
        self._seconds = np.where(times.start_s < np.inf, times.end_s - times.start_s, 0.0)
        edges = [*self._successors(), *self._in_order(), *self._in_lines(), *self._made()]
        edges += self._together(edges)
        edges.sort(key=lambda edge: edge[1])
        waits: dict[int, list[int]] = {n: [] for n in range(len(tasks))}
        for source, target, _ in edges:
            waits[target].append(source)
        self._order = np.array([*TopologicalSorter(waits).static_order()], np.int64)
        targets = [edge[1] for edge in edges]
        self._first = np.searchsorted(targets, np.arange(len(tasks) + 1)).astype(np.int64)
        self._source = np.array([edge[0] for edge in edges], np.int64)
        self._ahead_s = np.array([edge[2] for edge in edges], np.float64)
        steps = np.flatnonzero(tasks["role"] == STEP)
        self._first_step = int(steps[0]) if len(steps) else 0

    def times_s(self, factors: Reals) -> Reals:
        """Return the iteration time of each sample.

        Args:
            factors: on the duration of each task: samples x tasks.
        """
        edges = self._first, self._source, self._ahead_s
        ends_s: Reals = longest_paths(self._order, *edges, self._seconds, factors)
        return np.asarray(ends_s[:, self._first_step :].max(axis=1))

    def _successors(self) -> list[Edge]:
        tasks, successors = self._program.tasks, self._program[SUCCESSORS].tolist()
        rows = zip(tasks["successor"].tolist(), tasks["successor_end"].tolist(), strict=True)
        ends = [(n, successors[i], 0.0) for n, row in enumerate(rows) for i in range(*row)]
        starts = tasks["at_start"].tolist()
        return ends + [(n, m, np.inf) for n, m in enumerate(starts) if m >= 0]

    def _in_order(self) -> list[Edge]:
        """Each task of a device waits for the one before, the optimizer step for the last."""
        found: list[Edge] = []
        for device in self._program.devices:
            ran = self._times.order[device["order"] : device["order_end"]].tolist()
            step = [int(device["step"])] if device["step"] >= 0 and ran else []
            found += [(n, m, 0.0) for n, m in pairwise(ran + step)]
        return found

    def _in_lines(self) -> list[Edge]:
        program, lines = self._program, defaultdict(list)
        tasks, way_lines = program.tasks, program[WAY_LINES].tolist()
        for n in np.flatnonzero(np.isin(tasks["role"], (FLOW, LATE_FLOW))).tolist():
            way = program[WAYS][tasks["resource"][n]]
            for line in way_lines[way["line"] : way["line_end"]]:
                lines[line].append((int(self._times.requested[n]), n))
        return [(n, m, 0.0) for row in lines.values() for (_, n), (_, m) in pairwise(sorted(row))]

    def _made(self) -> list[Edge]:
        """Reductions wait for the last operation of a replica that makes their gradients."""
        program, last = self._program, dict[int, int]()
        tasks, times = program.tasks, self._times
        for n in times.order[np.argsort(times.start_s[times.order], kind="stable")].tolist():
            if tasks["makes"][n] >= 0:
                last[int(tasks["replica"][n])] = n
        return [
            (n, int(program[MAKERS][maker]), float(times.end_s[n] - times.made_s[maker]))
            for replica, n in last.items()
            for row in (program[REPLICAS][replica],)
            for maker in range(row["maker"], row["maker_end"])
        ]

    def _together(self, edges: list[Edge]) -> list[Edge]:
        """Tasks that start together wait for all that any of them waits for."""
        program = self._program
        if not program.numbers["groups"]:
            return []
        tasks, members = program.tasks, defaultdict(list)
        for device in program.devices:
            counts: defaultdict[int, int] = defaultdict(int)
            for n in self._times.order[device["order"] : device["order_end"]].tolist():
                group = int(tasks["group"][n])
                if group >= 0:
                    members[group, counts[group]].append(n)
                    counts[group] += 1
        with_it = {n: row for row in members.values() for n in row}
        return [
            (source, other, ahead_s)
            for source, target, ahead_s in edges
            for other in with_it.get(target, ())
            if other != target
        ]


@entry
def longest_paths(
    order: Ints, first: Ints, source: Ints, ahead_s: Reals, seconds: Reals, factors: Reals
) -> Reals:
    """Return the end of each task by row of factors: samples x tasks.

    Args:
        order: all tasks, each after those it waits for.
        first: the first edge into each task; those into it follow.
        source: task that an edge comes from.
        ahead_s: how long before the end of that one need not wait any more.
        seconds: of each task.
        factors: on these: samples x tasks.
    """
    count = len(seconds)
    start_s, ends_s = np.zeros(count), np.zeros((len(factors), count))
    for sample in range(len(factors)):
        for n in order:
            start = 0.0
            for edge in range(first[n], first[n + 1]):
                u = source[edge]
                free_s = ends_s[sample, u] - ahead_s[edge] * factors[sample, u]
                start = max(start, start_s[u], free_s)
            start_s[n] = start
            ends_s[sample, n] = start + seconds[n] * factors[sample, n]
    return ends_s
