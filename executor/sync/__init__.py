"""Strategies that make the ranks which hold the same parameters agree on them.

Hands out :class:`Synchronisation`, what the trainer asks of a strategy; :data:`STRATEGIES`, those
that run any plan with all ranks in step; :func:`make_strategy` and :func:`require_strategy`.
"""

from collections.abc import Callable, Mapping

from executor.sync.all_reduce import fused_all_reduce
from executor.sync.cross_iteration import CrossIteration, require_no_loss_scale
from executor.sync.decoupled import Decoupled
from executor.sync.protocol import Setting, Synchronisation
from executor.sync.sharded import all_reduce
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.sync.strategies import options_of

STRATEGIES: Mapping[str, Callable[[Setting], Synchronisation]] = {
    "all_reduce": all_reduce,
    "fused": fused_all_reduce,
    "decoupled": Decoupled,
    "cross_iteration": CrossIteration,
}


def require_strategy(plan: Plan) -> None:
    """Refuse what :data:`STRATEGIES` cannot do, before any process group is made.

    Raises:
        PipeplanError: naming the field and the remedy.
    """
    name = plan.sync.strategy
    options_of(plan.sync)
    if name not in STRATEGIES:
        raise PipeplanError(
            f"sync.strategy: {name!r} does not keep all ranks in step; use one of "
            f"{', '.join(STRATEGIES)} with --sync"
        )
    field = plan.job.sharing_field
    if plan.job.shards_state and name != "all_reduce":
        raise PipeplanError(
            f"sync.strategy: {name!r} keeps the optimizer's state whole on every rank, but "
            f"job.{field} is true; use --sync all_reduce, or plan with {field} = false"
        )
    if name == "cross_iteration":
        require_no_loss_scale(plan.job.precision == "float16")


def make_strategy(plan: Plan, setting: Setting) -> Synchronisation:
    """The plan's strategy.

    Raises:
        PipeplanError: as :func:`require_strategy`.
    """
    require_strategy(plan)
    return STRATEGIES[plan.sync.strategy](setting)


__all__ = ["STRATEGIES", "Setting", "Synchronisation", "make_strategy", "require_strategy"]
