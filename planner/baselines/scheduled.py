"""The plans of published planners: their stages in the fastest published schedule.

For schedules of several stages a device, a planner's stages are also cut into two chunks a device.
Narayanan et al. 2021 ("Efficient large-scale language model training on GPU clusters", section 2.2)
cut the layers once more and go round the devices twice; the zero-bubble V goes down and up again.
Both take equal chunks on equal devices. Here every stage keeps its devices and, as nearly as layers
allow, its share of all work, half of it in either chunk.

None of the planners decides about recomputation. Where memory binds, stages recompute as little as
some number of microbatches in flight needs, of several numbers that of the fastest schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from planner.baselines.layers import Baseline, Layers, Stage, Stages
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import is_connected, place
from planner.costs.stage_table import StageTable
from planner.errors import InfeasibleError
from planner.plan.problem import Problem
from planner.schedules.assignment import balanced_assignment
from planner.schedules.best import Scheduled, best_schedule
from planner.schedules.whole import one_by_one
from planner.simulation.simulator import simulate
from planner.units import format_bytes

FLIGHTS = (math.inf, 2.0, 1.0, 0.0)
"""Multiples of 1F1B's microbatches in flight for which stages recompute what they must; 0: one."""


class UnscheduledError(InfeasibleError):
    """A planner chose stages for which there is no schedule.

    Attributes:
        stages: what it chose.
    """

    def __init__(self, stages: tuple[StageSpec, ...], reason: str) -> None:
        super().__init__(reason)
        self.stages = stages


class ScheduledBaselines:
    """Plans of published planners for one problem.

    Args:
        problem: the model, cluster and job.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._layers = Layers(StageTable(problem))
        self._known: dict[tuple[Stage, tuple[str, ...]], tuple[int, int]] = {}
        self._schedules: dict[tuple[StageSpec, ...], Scheduled | None] = {}

    def best(self, planner: Baseline, below_s: float = math.inf) -> Scheduled | None:
        """Return the fastest schedule of a planner's stages, as they are or in two chunks each.

        Args:
            planner: whose stages.
            below_s: slower schedules are of no interest.

        Returns:
            The schedule; None if every one takes ``below_s`` or longer.

        Raises:
            UnscheduledError: if no schedule of its stages fits memory, or links do not join them;
                only where any time is of interest.
            InfeasibleError: if the planner finds no stages.
        """
        chosen = self._stages(planner)
        every = [row for stages in chosen for row in (stages, *self._chunked(stages))]
        placed = [place(self._problem, self._layers.specs(row)) for row in every]
        ranked = sorted((_least_s(pipeline), n) for n, pipeline in enumerate(placed))
        found: Scheduled | None = None
        for least_s, n in ranked:
            if least_s >= below_s:
                break
            for pipeline in self._recomputed(every[n]) if is_connected(placed[n]) else ():
                if _least_s(pipeline) >= below_s:
                    continue
                if (specs := tuple(row.spec for row in pipeline.stages)) not in self._schedules:
                    self._schedules[specs] = best_schedule(pipeline)
                schedule = self._schedules[specs]
                if schedule is not None and schedule.iteration_time_s < below_s:
                    found, below_s = schedule, schedule.iteration_time_s
        if found is None and math.isinf(below_s):
            raise self._unscheduled(chosen[-1])
        return found

    def _stages(self, planner: Baseline) -> list[Stages]:
        """Return a planner's stages, with cuts at the places that the job allows.

        Raises:
            InfeasibleError: if there are none, or none that keep together what a group splits.
        """
        rows = filter(None, map(self._layers.at_cuts, planner.stages(self._layers)))
        found = [row for row in rows if self._layers.keeps_groups(row)]
        if not found:
            raise InfeasibleError(
                f"{planner.name}: no stages are left if cuts keep to the places that the job and "
                "tensor-parallel groups allow"
            )
        return found

    # --- recomputation ----------------------------------------------------------------------------

    def _recomputed(self, stages: Stages) -> list[PlacedPipeline]:
        """Return the stages placed, with each choice of what they recompute."""
        specs = self._layers.specs(stages)
        rows = {specs: None}
        if self._problem.job.recompute:
            by_rank = (True,) if self._problem.job.recompute == "blocks" else (True, False)
            choices = (self._choice(stages, *row) for row in product(FLIGHTS, by_rank))
            rows = dict.fromkeys(
                tuple(replace(s, recompute=again) for s, again in zip(specs, choice, strict=True))
                for choice in choices
            )
        return [place(self._problem, row) for row in rows]

    def _choice(self, stages: Stages, flight: float, by_rank: bool) -> list[tuple[str, ...]]:
        """Return what stages recompute so that microbatches in flight fit, as far as they can.

        Where a job recomputes as many blocks of every stage, all have the largest limit.

        Args:
            stages: on devices.
            flight: a multiple of 1F1B's microbatches in flight.
            by_rank: recompute layers that free most memory a second first, else those in front.
        """
        most, limits = self._layers.length, Counter[str]()
        for device in {device for row in stages for device in row.devices}:
            held = [n for n, row in enumerate(stages) if device in row.devices]
            fits = (
                limit
                for limit in range(most + 1)
                if self._fits(stages, device, held, flight, limit, by_rank)
            )
            limits[device] = next(fits, most)
        found = [max(limits[device] for device in row.devices) for row in stages]
        if self._problem.job.recompute == "blocks":
            found = [max(found)] * len(found)
        return [self._again(row, n, by_rank) for row, n in zip(stages, found, strict=True)]

    def _again(self, stage: Stage, limit: int, by_rank: bool) -> tuple[str, ...]:
        table = self._layers.table
        if by_rank:
            return table.recomputed(stage.begin, stage.end, limit)
        return table.layers[stage.begin : min(stage.end, stage.begin + limit)]

    def _fits(
        self,
        stages: Stages,
        device: str,
        held: Sequence[int],
        flight: float,
        limit: int,
        by_rank: bool,
    ) -> bool:
        """Return whether a device holds its stages with microbatches in flight."""
        cluster, count = self._problem.cluster, self._problem.job.microbatches
        type_name, needed, workspace = cluster.type_of(device), 0, 0
        for n in held:
            replicas = len(stages[n].devices)
            holders = replicas * self._problem.copies
            figures = self._layers.table.figures(type_name, *stages[n][:2], holders=holders)
            share = -(-count // replicas)
            behind = -(-sum(len(row.devices) for row in stages[n:]) // replicas)
            in_flight = share if math.isinf(flight) else min(share, max(1, int(flight * behind)))
            stash, more = self._bytes(stages[n], self._again(stages[n], limit, by_rank))
            needed += int(figures.static_bytes) + in_flight * stash
            workspace = max(workspace, more)
        return needed + workspace <= cluster.device_type(device).capacity_bytes

    def _bytes(self, stage: Stage, again: tuple[str, ...]) -> tuple[int, int]:
        """Return the bytes of a stash, and of what else a stage between all others may hold."""
        if (key := (stage, again)) not in self._known:
            before = stage._replace(begin=0, end=stage.begin)
            behind = stage._replace(begin=stage.end, end=self._layers.length)
            first, spec, last = self._layers.specs((before, stage, behind))
            rows = (first, replace(spec, recompute=again), last)
            table = StageTable(self._problem, tuple(row for row in rows if row.layers))
            kind, arrays = self._layers.kind_of(stage.devices[0]), table.arrays
            found = table.figures(table.types[kind], *stage[:2], rerun=1, offload=1)
            gradients = arrays.crossing_gradient[kind, list(stage[:2])].sum()
            more = found.workspace_bytes + max(arrays.crossing[kind, stage.end], gradients)
            self._known[key] = int(found.stash_bytes), int(more)
        return self._known[key]

    # --- chunks -----------------------------------------------------------------------------------

    def _chunked(self, stages: Stages) -> Iterator[Stages]:
        """Yield two chunks a stage: in a loop and, if backwards may split, as a V.

        No published schedule for a V has whole backwards alone. Nothing is yielded for a single
        stage, where the job allows no second stage a device or fewer stages, or where the layers do
        not suffice or may not run on the devices.
        """
        job, most = self._problem.job, self._layers.cut_limit
        most = min(most, job.max_stages or most)
        if job.max_stages_per_device < 2 or not 1 < len(stages) <= most // 2:
            return
        for second in (stages, stages[::-1]) if job.splits else (stages,):
            chunks = self._layers.at_cuts(self._cut((*stages, *second)))
            if chunks and self._layers.may_run(chunks):
                yield chunks

    def _cut(self, chunks: Stages) -> Stages:
        """Return chunks on the devices of these stages, each with half of the stage's work."""
        length = self._layers.length
        done = np.concatenate([[0.0], np.cumsum(self._layers.work_s.mean(axis=0))])
        halves = np.array([(done[row.end] - done[row.begin]) / 2 for row in chunks])
        cuts = [0]
        for number, wanted in enumerate(np.cumsum(halves)[:-1], start=1):
            nearest = int(np.abs(done - wanted).argmin())
            # Every chunk before and after needs a layer of its own.
            cuts.append(min(max(nearest, cuts[-1] + 1), length - (len(chunks) - number)))
        ends = pairwise([*cuts, length])
        return tuple(Stage(*end, row.devices) for end, row in zip(ends, chunks, strict=True))

    # --- errors -----------------------------------------------------------------------------------

    def _unscheduled(self, stages: Stages) -> UnscheduledError:
        pipeline = place(self._problem, self._layers.specs(stages))
        reason = "some of its neighbouring stages or replicas are not joined"
        if is_connected(pipeline):
            reason = _lack_of_memory(pipeline)
        return UnscheduledError(self._layers.specs(stages), reason)


def _least_s(pipeline: PlacedPipeline) -> float:
    """Return a time that no schedule of the stages beats, whatever they recompute."""
    if not is_connected(pipeline):
        return math.inf
    return max(
        pipeline.microbatches / sum(_speeds(pipeline, n)) for n in range(len(pipeline.stages))
    )


def _speeds(pipeline: PlacedPipeline, stage: int) -> Iterator[float]:
    """Yield the microbatches a second of each replica of a stage."""
    for times in pipeline.stages[stage].times.values():
        split_s = times.input_gradient_s + times.weight_gradient_s
        back_s = min(times.backward_s, split_s) if pipeline.problem.job.splits else times.backward_s
        yield 1 / max(times.forward_s + back_s, 1e-15)


def _lack_of_memory(pipeline: PlacedPipeline) -> str:
    """Say which device lacks most even if one microbatch runs after the other."""
    timeline = simulate(pipeline, one_by_one(pipeline, balanced_assignment(pipeline)))
    peaks = timeline.peak_memory_bytes
    worst = max(peaks, key=lambda device: peaks[device] - pipeline.capacity_bytes(device))
    stages = ", ".join(map(str, pipeline.stages_on[worst]))
    return (
        f"does not fit: stage {stages} needs {format_bytes(peaks[worst])} on {worst!r} with one "
        f"microbatch in flight, it has {format_bytes(pipeline.capacity_bytes(worst))}"
    )
