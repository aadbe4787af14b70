"""Places stages on devices: works out the figures of a pipeline from cluster, graph and job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from planner.costs.optimizer import optimizer_s, state_holders, static_bytes
from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.reductions import Collectives
from planner.costs.roofline import KINDS, OperationTimes
from planner.costs.stage_spec import StageSpec
from planner.costs.stage_spec import has_equal_groups as has_equal_groups
from planner.costs.stage_spec import specs_of as specs_of
from planner.plan.plan import Plan, Sync, overlapped_bucket_bytes
from planner.plan.problem import Problem

if TYPE_CHECKING:
    from planner.costs.stage_table import StageTable


def place(
    problem: Problem, stages: Sequence[StageSpec], sync: Sync | None = None
) -> PlacedPipeline:
    """Compute the figures of a partition.

    Args:
        problem: the model, cluster and job.
        stages: in pipeline order; every layer in exactly one, no edge backwards.
        sync: the strategy of synchronisation; None: the default, which overlaps if the job allows
            it.
    """
    # numba takes half a second to import, so only who places stages waits for that.
    from planner.costs.placed_reductions import placed_reductions
    from planner.costs.stage_table import StageTable

    sync, table = sync or Sync(), StageTable(problem, tuple(stages))
    devices = [stage.devices for stage in stages]
    behaviour = problem.runtime.behaviour_on(devices)
    bucket_bytes = overlapped_bucket_bytes(problem.job, sync, behaviour)
    synchronisations, collectives = placed_reductions(table, bucket_bytes)
    parameters = [problem.graph_on(stage.devices).parameters_of(stage.layers) for stage in stages]
    holders = state_holders(problem, devices, parameters, problem.copies)
    figures = _StageFigures(table, behaviour.computation_s, collectives)
    return PlacedPipeline(
        problem=problem,
        stages=tuple(
            figures.placed(number, static_bytes(problem, held, holders))
            for number, held in enumerate(parameters)
        ),
        synchronisations=synchronisations,
        optimizer_s=optimizer_s(problem, devices, parameters, holders),
        microbatches=problem.job.microbatches,
        sync=sync,
    )


class _StageFigures:
    """The figures of given stages.

    Args:
        table: of the stages.
        host_s: seconds of the host for each computation.
        collectives: seconds of those around layers, by stage.
    """

    def __init__(
        self, table: StageTable, host_s: float, collectives: Sequence[Mapping[str, Collectives]]
    ) -> None:
        self._table, self._host_s, self._collectives = table, host_s, collectives

    def placed(self, number: int, static: int) -> PlacedStage:
        """Return a stage with its figures, of those bytes that devices hold all the time."""
        arrays, spec = self._table.arrays, self._table.stages[number]
        kind, (first, last) = self._kind(number), self._table.cuts[number]
        sender, receiver = self._kind(number - 1), self._kind(number + 1)
        among, name = len(spec.devices) * self._table.problem.copies, self._table.types[kind]
        held = self._table.figures(name, first, last, rerun=1, offload=1, holders=among)
        return PlacedStage(
            spec=spec,
            times=self._times(number),
            static_bytes=static,
            workspace_bytes=int(held.workspace_bytes),
            split_workspace_bytes=int(held.split_workspace_bytes),
            stash_bytes=int(held.stash_bytes),
            weight_stash_bytes=int(held.weight_stash_bytes),
            input_bytes=int(arrays.crossing[kind, first]),
            output_bytes=int(arrays.crossing[kind, last]),
            input_gradient_bytes=int(arrays.crossing_gradient[kind, first]),
            output_gradient_bytes=int(arrays.crossing_gradient[kind, last]),
            sent_bytes=int(arrays.sent[receiver, last]),
            returned_bytes=int(arrays.returned[sender, first]),
            gathered_bytes=int(arrays.gathered[kind, last]),
            returned_gathered_bytes=int(arrays.returned_gathered[kind, first]),
            offload_bytes=int(held.offload_bytes),
            collective_s=self._collectives[number],
        )

    def _kind(self, number: int) -> int:
        """Return the number of the type of a stage, or of the one at that end of the pipeline."""
        number = min(max(number, 0), len(self._table.stages) - 1)
        cluster = self._table.problem.cluster
        return self._table.types.index(cluster.type_of(self._table.stages[number].devices[0]))

    def _times(self, number: int) -> dict[str, OperationTimes]:
        type_of, table = self._table.problem.cluster.type_of, self._table
        names = {device: type_of(device) for device in table.stages[number].devices}
        times = {
            name: self._times_on(number, table.types.index(name)) for name in set(names.values())
        }
        return {device: times[name] for device, name in names.items()}

    def _times_on(self, number: int, kind: int) -> OperationTimes:
        arrays, span = self._table.arrays, slice(*self._table.cuts[number])
        seconds = arrays.seconds[kind, span].copy()
        again_s = np.where(arrays.rerun_rank[span] == 0, arrays.again_s[kind, span], 0.0)
        seconds[:, [KINDS.index("B"), KINDS.index("I")]] += again_s[:, None]
        names = self._table.layers[span]
        rows = [self._collectives[number].get(name, Collectives()) for name in names]
        seconds += [[row.in_operation(letter) for letter in KINDS] for row in rows]
        whole_s, forward_s, input_s, weight_s = np.cumsum(seconds, axis=0)[-1] + self._host_s
        return OperationTimes(*map(float, (forward_s, input_s, weight_s, whole_s)))


def place_plan(plan: Plan) -> PlacedPipeline:
    """Compute the figures of a plan's stages from its cluster, job, graph and strategy."""
    return place(plan.problem, specs_of(plan.stages), plan.sync)


def is_connected(placed: PlacedPipeline) -> bool:
    """Return whether every transfer and every all-reduce of the pipeline has a path."""
    seconds = [row.seconds for row in placed.synchronisations]
    seconds += [s for stage in placed.stages for row in stage.collective_s.values() for s in row]
    return _is_joined(placed) and all(map(math.isfinite, seconds))


def _is_joined(placed: PlacedPipeline) -> bool:
    """Return whether there is a path between all devices of neighbouring stages."""
    cluster = placed.problem.cluster
    for first, second in pairwise(placed.stages):
        rows, columns = (
            [cluster.numbers[device] for device in side.spec.devices] for side in (first, second)
        )
        if not np.isfinite(cluster.link_table.latency_s[np.ix_(rows, columns)]).all():
            return False
    return True
