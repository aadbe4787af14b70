"""The plans of published planners: their stages in the fastest published schedule.

For schedules of several stages a device, a planner's partition is also cut into two chunks a
device. Narayanan et al. 2021 ("Efficient large-scale language model training on GPU clusters",
section 2.2) cut the layers once more and go round the devices twice; the zero-bubble V goes down
and up again. Both take equal chunks on equal devices. Here every stage keeps its devices and, as
nearly as layers allow, its share of all work, half of it in either chunk: what a planner balanced
stays balanced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import has_equal_groups, is_connected, place
from planner.errors import InfeasibleError
from planner.search.partition.baselines import Baseline
from planner.search.partition.chain import Chain, Partition, StageChoice
from planner.search.recomputed import RecomputedSchedules
from planner.search.schedule.assignment import balanced_assignment
from planner.search.schedule.classics import one_by_one
from planner.search.schedule.heuristic import Schedule, best_classic_schedule
from planner.simulation.simulator import simulate
from planner.units import format_bytes


class UnscheduledError(InfeasibleError):
    """A planner chose stages for which there is no schedule.

    Attributes:
        stages: what it chose.
    """

    def __init__(self, stages: tuple[StageSpec, ...], reason: str) -> None:
        super().__init__(reason)
        self.stages = stages


class BaselineSchedules:
    """Plans of published planners for one problem.

    Args:
        chain: the layers.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._recomputed = RecomputedSchedules(chain, best_classic_schedule)

    def best(self, planner: Baseline, below_s: float = math.inf) -> Schedule | None:
        """Return the fastest schedule of a planner's stages, as they are or in two chunks each.

        Layers are recomputed and microbatches in flight limited as memory requires.

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
        partitions = self._partitions(planner)
        rows = [
            (self._promise_s(row), number, row)
            for number, row in enumerate(
                row
                for partition in partitions
                for row in (partition, *chunked_partitions(self._chain, partition))
            )
        ]
        found: Schedule | None = None
        for promise_s, _, row in sorted(rows, key=lambda row: row[:2]):
            most_s = below_s if found is None else found.iteration_time_s
            if promise_s >= most_s:
                break
            schedule = self._scheduled(row)
            if schedule is not None and schedule.iteration_time_s < most_s:
                found = schedule
        if found is None and math.isinf(below_s):
            raise self._unscheduled(partitions[-1])
        return found

    def _promise_s(self, partition: Partition) -> float:
        """Return a time that no schedule of the stages beats; infinity if they cannot run."""
        pipeline = self._placed(partition)
        if not is_connected(pipeline):
            return math.inf
        return self._recomputed.promise_s(partition, pipeline)

    def _partitions(self, planner: Baseline) -> list[Partition]:
        """Return a planner's stages; groups of devices cannot divide what they split.

        Raises:
            InfeasibleError: if there are none, or none that keep together what a group splits.
        """
        partitions = planner.partitions(self._chain)
        if self._chain.problem.has_groups:
            at_cuts = filter(None, map(self._chain.at_cuts, partitions))
            problem, specs = self._chain.problem, self._chain.specs
            partitions = [row for row in at_cuts if has_equal_groups(problem, specs(row))]
        if not partitions:
            raise InfeasibleError(
                f"{planner.name}: no stages are left if cuts keep to the places that the job and "
                "tensor-parallel groups allow"
            )
        return partitions

    def _scheduled(self, partition: Partition) -> Schedule | None:
        return self._recomputed.best(partition, self._placed(partition))

    def _placed(self, partition: Partition) -> PlacedPipeline:
        return place(self._chain.problem, self._chain.specs(partition))

    def _unscheduled(self, partition: Partition) -> UnscheduledError:
        pipeline = self._placed(partition)
        reason = "some of its neighbouring stages or replicas are not joined"
        if is_connected(pipeline):
            reason = _lack_of_memory(pipeline)
        return UnscheduledError(self._chain.specs(partition), reason)


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


# --- chunks ---------------------------------------------------------------------------------------


def chunked_partitions(chain: Chain, partition: Partition) -> Iterator[Partition]:
    """Yield the partition with two chunks a stage: in a loop and, if backwards may split, as a V.

    No published schedule for a V has whole backwards alone.

    Args:
        chain: the layers.
        partition: one stage a device. Nothing is yielded for a single stage, where the job allows
            no second stage a device or fewer stages, or where the layers do not suffice or may not
            run on the devices.
    """
    job, stages = chain.problem.job, len(partition)
    if job.max_stages_per_device < 2 or not 1 < stages <= chain.stage_limit // 2:
        return
    seconds = [partition, partition[::-1]] if job.splits else [partition]
    chunked = (_cut(chain, (*partition, *second)) for second in seconds)
    yield from filter(chain.keeps_rules, chunked)


def _cut(chain: Chain, chunks: Partition) -> Partition:
    """Return chunks on the devices of these stages, each with half of the stage's work."""
    done = np.concatenate([[0.0], np.cumsum(chain.work_s.mean(axis=0))])
    halves = np.array([(done[stage.end] - done[stage.begin]) / 2 for stage in chunks])
    cuts = [0]
    for number, wanted in enumerate(np.cumsum(halves)[:-1], start=1):
        nearest = int(np.abs(done - wanted).argmin())
        # Every chunk before and after needs a layer of its own.
        cuts.append(min(max(nearest, cuts[-1] + 1), chain.length - (len(chunks) - number)))
    return tuple(
        StageChoice(begin, end, stage.devices)
        for (begin, end), stage in zip(pairwise([*cuts, chain.length]), chunks, strict=True)
    )
