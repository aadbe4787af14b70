"""A plan of what already runs: given stages under a given schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.adopting.division import Division, divide
from planner.adopting.orders import Schedule, orders_by, ranks_of, schedule_name
from planner.adopting.ranks import Lanes, lanes_on
from planner.artifacts.blocks import block_name
from planner.artifacts.plan import Plan
from planner.artifacts.problem import Problem
from planner.assemble import plan_by_hand
from planner.costs.placement import PlacedPipeline, StageSpec, is_connected, place
from planner.errors import DeadlockError, PipeplanError
from planner.importing.schedule_csv import ScheduleTable


@dataclass(frozen=True)
class Adopted:
    """A plan and what it was put together from.

    Attributes:
        plan: as it is run.
        schedule: its name.
        lanes: of each pipeline the device of each stage.
    """

    plan: Plan
    schedule: str
    lanes: Lanes


def adopt(
    problem: Problem,
    stages: str | Sequence[Sequence[str]],
    *,
    schedule: Schedule = None,
    pipeline_size: int | None = None,
    replicas: int = 1,
    devices: Sequence[str] | None = None,
    recompute: bool = False,
) -> Plan:
    """A plan of what already runs, in place of a search.

    Stage i is on pipeline rank i mod ``pipeline_size``, in a V for ``zb-v`` and ``dualpipe-v``, or
    where the table of a schedule says. The plan need not fit into memory: :func:`planner.verify`
    tells.

    Args:
        problem: the model, cluster and job.
        stages: a layout of Megatron-LM, such as ``"Et*3|(tt|)*4L"``, or the names of modules or
            layers for each stage, such as torchtitan's ``module_fqns_per_model_part``.
        schedule: a name of :data:`planner.adopting.orders.SCHEDULES`, or a table; 1F1B if it is
            not told, interleaved where a rank holds several stages.
        pipeline_size: ranks of a pipeline; as many as stages if it is not told.
        replicas: equal pipelines, each on its share of the microbatches.
        devices: of rank 0's replicas, then rank 1's, and so on; the cluster's if not told.
        recompute: whether every numbered block runs again in the backward; every layer where the
            model has none.

    Raises:
        PipeplanError: naming what of it is wrong.
    """
    return adopted(
        problem,
        divide(problem.graph, stages),
        schedule=schedule,
        pipeline_size=pipeline_size,
        replicas=replicas,
        devices=devices,
        recompute=recompute,
    ).plan


def adopted(
    problem: Problem,
    division: Division,
    *,
    schedule: Schedule,
    pipeline_size: int | None,
    replicas: int,
    devices: Sequence[str] | None,
    recompute: bool,
) -> Adopted:
    """As :func:`adopt`, for stages by their layers, with what the plan was put together from."""
    ranks = ranks_of(schedule, len(division), pipeline_size)
    lanes = lanes_on(problem.cluster, ranks, replicas, devices)
    pipeline = placed(problem, division, lanes, recompute=recompute)
    name = schedule_name(schedule, ranks)
    orders = orders_by(pipeline, lanes, schedule if isinstance(schedule, ScheduleTable) else name)
    try:
        plan = plan_by_hand(pipeline, orders)
    except DeadlockError as error:
        raise PipeplanError(f"{name}: {error}; correct the order of one of them") from None
    solver = f"none: adopted with {name}"
    provenance = plan.provenance.model_copy(update={"solver": solver})
    return Adopted(plan.model_copy(update={"provenance": provenance}), name, lanes)


def placed(
    problem: Problem, division: Division, lanes: Lanes, *, recompute: bool
) -> PlacedPipeline:
    """The stages on the devices of their lanes.

    Raises:
        PipeplanError: if two devices that must exchange data have no path of links.
    """
    again = _recomputed(division) if recompute else [()] * len(division)
    holders = zip(*lanes, strict=True)
    rows = zip(division, holders, again, strict=True)
    pipeline = place(problem, [StageSpec(*row) for row in rows])
    if not is_connected(pipeline):
        raise PipeplanError(
            "devices: two of them that must exchange data have no path of links; choose others "
            "or add links to the cluster file"
        )
    return pipeline


def _recomputed(division: Division) -> list[tuple[str, ...]]:
    """The layers in numbered blocks, or all where there is no block."""
    blocks = [tuple(name for name in stage if block_name(name)) for stage in division]
    return blocks if any(blocks) else list(division)
