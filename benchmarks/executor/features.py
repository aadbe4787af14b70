"""What the plans of a training have, of all that plans may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from benchmarks.executor.plans import PARTLY_FROZEN
from planner.plan.plan import Plan

Has = Callable[[Plan], bool]


def _has_replicas(plan: Plan) -> bool:
    return any(len(stage.devices) > 1 for stage in plan.stages)


def _has_chunks(plan: Plan) -> bool:
    return max(Counter(on for stage in plan.stages for on in stage.devices).values()) > 1


def _runs_unequally(plan: Plan) -> bool:
    """Whether a stage has replicas that run different numbers of its microbatches."""
    orders = plan.parsed_orders()
    return any(
        len({sum(o[:2] == (stage.index, "F") for o in orders[on]) for on in stage.devices}) > 1
        for stage in plan.stages
    )


def _splits(plan: Plan) -> bool:
    return any("W" in order for order in plan.orders.values())


def _model(plan: Plan) -> str:
    return f"{plan.model.factory} {plan.model.arguments.get('name')}"


_OF_A_PLAN: Mapping[str, Has] = {
    "single devices": lambda plan: plan.degrees == (1,),
    "groups of 2": lambda plan: 2 in plan.degrees,
    "groups of 4": lambda plan: 4 in plan.degrees,
    "groups of several sizes": lambda plan: len(plan.degrees) > 1,
    "sequence parallelism": lambda plan: plan.job.sequence_parallel,
    "a mixture of experts": lambda plan: "mixtral" in _model(plan),
    "expert parallelism": lambda plan: plan.job.expert_parallel,
    "several stages a device": _has_chunks,
    "replicas": _has_replicas,
    "replicas with uneven microbatches": _runs_unequally,
    "shared optimizer state (ZeRO-1)": lambda plan: (
        plan.job.shard_optimizer is True and not plan.job.shards_parameters and _has_replicas(plan)
    ),
    "divided weights (ZeRO-3)": lambda plan: plan.job.shards_parameters and _has_replicas(plan),
    "overlapped reductions": lambda plan: plan.overlaps and _has_replicas(plan),
    "split backwards": _splits,
    "recomputed layers": lambda plan: any(stage.recompute for stage in plan.stages),
    "recomputed attention": lambda plan: plan.job.recompute_attention,
    "dropout": lambda plan: "dropout" in plan.model.arguments,
    "frozen parameters": lambda plan: plan.model.factory == PARTLY_FROZEN,
}


def _any(has: Has) -> Callable[[Sequence[Plan]], bool]:
    return lambda plans: any(map(has, plans))


FEATURES: Mapping[str, Callable[[Sequence[Plan]], bool]] = {
    **{name: _any(has) for name, has in _OF_A_PLAN.items()},
    "a checkpoint resumed under another plan": lambda plans: len(plans) > 1,
}
"""Whether a training has each: one of its plans, or several plans."""
