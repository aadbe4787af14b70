"""All partitions of a small cluster whose bound is below a time, the most promising first.

A partition's bound counts what the passes over classes of devices do, but along its own stages, so
it is never below what these prove of all. Any plan that is faster has one of these partitions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.bounds.class_pass import (
    Apart,
    StageWork,
    apart_at,
    crossed_s,
    fastest,
    number_passed,
    room_to_work,
    stage_spent_s,
)
from planner.bounds.class_tables import ClassArrays
from planner.bounds.classes import MARGIN, ClassProgram
from planner.bounds.devices import NO_SIDE, DeviceVectors
from planner.bounds.intervals import IntervalTable
from planner.bounds.layers import FloatArray, IntArray, LayerTable
from planner.bounds.named import Stages
from planner.bounds.proving import classes_of
from planner.errors import PipeplanError
from planner.plan.problem import Problem
from planner.program.compiled import compiled, entry

MOST_NODES = 20_000_000
"""Stages of partitions that are looked at."""
MOST_FOUND = 100_000
"""Partitions that are listed."""
TOLERANCE = 1e-5
"""The share to which the bound of a partition is worked out."""


class BoundedPartition(NamedTuple):
    """A partition that may have a plan below a time.

    Attributes:
        bound_s: no plan of these stages takes less.
        stages: in pipeline order.
    """

    bound_s: float
    stages: Stages


class PartitionList(NamedTuple):
    """What :func:`list_partitions` found.

    Attributes:
        partitions: by their bounds, the least first.
        is_complete: whether every plan below the time has one of them; if not, there were too many.
    """

    partitions: tuple[BoundedPartition, ...]
    is_complete: bool


def list_partitions(
    problem: Problem, below_s: float, *, most: int = MOST_FOUND, most_nodes: int = MOST_NODES
) -> PartitionList:
    """List every partition whose bound is below a time.

    Args:
        problem: the layer graph, the cluster and the job; one stage a device.
        below_s: of a plan, usually the best one known.
        most: partitions that are listed.
        most_nodes: stages that are looked at, a measure of work that is the same on every machine.

    Raises:
        PipeplanError: if devices may hold several stages, or there are too many layers or
            combinations of devices.
    """
    if problem.job.max_stages_per_device > 1:
        raise PipeplanError(
            f"max_stages_per_device = {problem.job.max_stages_per_device}: partitions are listed "
            "for one stage a device; set it to 1"
        )
    classes = next(classes_of(problem.cluster))
    program = ClassProgram(IntervalTable(LayerTable(problem)), classes)
    arrays, columns = program.arrays, program.columns
    steps = _steps(program.vectors)
    splits, limit_s = problem.job.space.splits, below_s * MARGIN
    found, lengths, is_complete = _search(arrays, steps, columns, limit_s, splits, most, most_nodes)
    bounds = _bounds(arrays, steps, columns, below_s, splits, found, lengths)
    rows = []
    for n in np.argsort(bounds, kind="stable"):
        path = found[n, : lengths[n]]
        rows.append(BoundedPartition(float(bounds[n]), program.stages(path)))
    return PartitionList(tuple(rows), bool(is_complete))


class _Steps(NamedTuple):
    """Which pairs (used before, stage) may follow each other.

    Attributes:
        first: pairs before which nothing is used.
        begin: (P + 1) of each pair, the beginning of those that may follow it.
        pair: these.
        between: of each, the pair of the two stages' sets.
    """

    first: IntArray
    begin: IntArray
    pair: IntArray
    between: IntArray


def _steps(vectors: DeviceVectors) -> _Steps:
    pairs = len(vectors.used)
    pair = np.repeat(np.arange(pairs), np.diff(vectors.way_begin))
    order = np.argsort(vectors.way_before, kind="stable")
    begin = np.searchsorted(vectors.way_before[order], np.arange(pairs + 1))
    first = np.flatnonzero(vectors.begins)
    return _Steps(first, begin, pair[order], vectors.way_between[order])


class _Labels(NamedTuple):
    """What is known behind each stage of a sequence, a row for each stage.

    Attributes:
        way_s: of a microbatch there and back, with what follows on the stages.
        work_s: before the next stage's first forward.
        past_s: when the first microbatches have passed, by place in NUMBERS.
        home_s: what follows before the last gradients begin.
        apart: (.., 3) of a stage on two classes, the fields of :class:`Apart`.
    """

    way_s: FloatArray
    work_s: FloatArray
    past_s: FloatArray
    home_s: FloatArray
    apart: FloatArray


@compiled
def _labels(stages: int, columns: int) -> _Labels:
    table = np.zeros((2, stages + 1))
    each = np.zeros((2, stages + 1, columns))
    return _Labels(table[0], table[1], each[0], each[1], np.zeros((stages + 1, 3)))


@compiled
def _keeps(
    d: ClassArrays,
    work: StageWork,
    labels: _Labels,
    depth: int,
    cut: int,
    end: int,
    pair: int,
    before: int,
    between: int,
    limit_s: float,
    splits: bool,
) -> bool:
    """Return whether a stage keeps a time behind others, and note what is known behind it.

    Args:
        d: of the problem.
        work: room to work in.
        labels: of the stages before; those of this one are written.
        depth: stages before.
        cut: before the stage.
        end: the cut behind it.
        pair: what is used before the stage, and its devices.
        before: the pair of the stage before.
        between: its devices and those of the stage before; negative: there is none.
        limit_s: to keep.
        splits: whether backwards may be split.
    """
    o = d.option[pair]
    if not d.fits[o, cut, end]:
        return False
    there, back, busy = 0.0, 0.0, 0.0
    if between >= 0:
        there, back, busy = d.there_s[cut, between], d.back_s[cut, between], d.busy_s[cut, between]
    way, forwards = labels.way_s[depth], labels.work_s[depth]
    if max(way, forwards) + busy > limit_s:
        return False
    if between >= 0:
        row = labels.apart[depth]
        apart = apart_at(d, cut, before, way, Apart(row[0], row[1], row[2]))
        for n, figure in enumerate(apart):
            labels.apart[depth + 1, n] = figure
        sides = d.side[before], d.side[pair]
        crosses = sides[0] != sides[1] and max(sides) < NO_SIDE
        if crosses and crossed_s(d, cut, *sides, apart) > limit_s:
            return False
    work.come[:] = labels.past_s[depth] + there
    work.follow[:] = labels.home_s[depth] + back
    forward, gradient = fastest(d, o, cut, end)
    after, joint = d.after[pair], d.joint_s[o, cut, end]
    arrival = forwards + there
    if splits:
        most = limit_s - forward - d.rest_s[0, after, end]
        reached = (arrival, forwards, arrival)
        spent = stage_spent_s(d, work, o, cut, end, most, limit_s, False, reached, joint)
        if spent > most:
            return False
    path = forward + gradient
    most = limit_s - path - d.rest_s[1, after, end]
    reached = (way + there + back, way, max(d.head_s[o, cut], arrival))
    spent = stage_spent_s(d, work, o, cut, end, most, limit_s, True, reached, joint)
    if spent > most:
        return False
    labels.way_s[depth + 1], labels.work_s[depth + 1] = spent + path, arrival + forward
    replicas = d.held[o].sum()
    number_passed(work.come, forward, replicas, labels.past_s[depth + 1])
    number_passed(work.last, gradient, replicas, labels.home_s[depth + 1])
    return True


@entry
def _search(
    d: ClassArrays,
    steps: _Steps,
    columns: int,
    limit_s: float,
    splits: bool,
    most: int,
    most_nodes: int,
) -> tuple[IntArray, IntArray, bool]:
    """Return all sequences of stages that keep a time, by depth-first search.

    Returns:
        Pair and end of each stage, how many stages each sequence has, and whether they are all.
    """
    cuts = len(d.there_s)
    work, labels = room_to_work(d.held.shape[1], columns), _labels(cuts, columns)
    found = np.zeros((64, cuts, 2), dtype=np.int64)
    lengths = np.zeros(64, dtype=np.int64)
    number, nodes = 0, 0
    # Of each depth: the way that is taken next, its end, and what it leads to.
    way, until = np.zeros((2, cuts + 1), dtype=np.int64)
    end, path = np.zeros(cuts + 1, dtype=np.int64), np.zeros((cuts, 2), dtype=np.int64)
    depth = 0
    way[0], until[0], end[0] = 0, len(steps.first), 0
    while depth >= 0:
        cut = path[depth - 1, 1] if depth else 0
        end[depth] = max(end[depth], cut) + 1
        if end[depth] >= cuts:
            way[depth] += 1
            end[depth] = cut + 1
        if way[depth] >= until[depth] or cut + 1 >= cuts:
            depth -= 1
            continue
        pair, before, between = steps.first[0], -1, -1
        if depth:
            pair, between = steps.pair[way[depth]], steps.between[way[depth]]
            before = path[depth - 1, 0]
        else:
            pair = steps.first[way[depth]]
        nodes += 1
        if nodes > most_nodes:
            return found[:number], lengths[:number], False
        stop = end[depth]
        if not _keeps(d, work, labels, depth, cut, stop, pair, before, between, limit_s, splits):
            continue
        path[depth, 0], path[depth, 1] = pair, stop
        if stop == cuts - 1:
            if number == most:
                return found[:number], lengths[:number], False
            if number == len(lengths):
                found = np.concatenate((found, np.zeros_like(found)))
                lengths = np.concatenate((lengths, np.zeros_like(lengths)))
            found[number], lengths[number] = path, depth + 1
            number += 1
            continue
        depth += 1
        way[depth], until[depth], end[depth] = steps.begin[pair], steps.begin[pair + 1], stop
    return found[:number], lengths[:number], True


@entry
def _bounds(
    d: ClassArrays,
    steps: _Steps,
    columns: int,
    below_s: float,
    splits: bool,
    found: IntArray,
    lengths: IntArray,
) -> FloatArray:
    """Return the largest time that each sequence of stages is known not to keep, by bisection."""
    work, labels = room_to_work(d.held.shape[1], columns), _labels(len(d.there_s), columns)
    bounds = np.zeros(len(lengths))
    for n in range(len(lengths)):
        low, high = 0.0, below_s
        while high > low * (1 + TOLERANCE):
            middle = (low + high) / 2 if low else high * 0.75
            cut, keeps, before = 0, True, -1
            for depth in range(lengths[n]):
                pair, end = found[n, depth]
                between = -1
                if depth:
                    for way in range(steps.begin[before], steps.begin[before + 1]):
                        if steps.pair[way] == pair:
                            between = steps.between[way]
                limit_s = middle * MARGIN
                keeps = _keeps(
                    d, work, labels, depth, cut, end, pair, before, between, limit_s, splits
                )
                if not keeps:
                    break
                cut, before = end, pair
            if keeps:
                high = middle
            else:
                low = middle
            if high < 1e-12:
                break
        bounds[n] = low
    return bounds
