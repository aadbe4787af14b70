"""The user's own loss, imported only if the user named it."""

from __future__ import annotations

from planner.artifacts.job import LOSSES
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.tracing.factory import Loss, import_loss


def allowed_loss(plan: Plan, named: str | Loss | None) -> Loss | None:
    """The function that the plan's loss names, or None where Pipeplan knows the loss itself.

    A plan is data: a ``module:function`` that it holds is imported only if the user names the same
    one, or gives the function.

    Raises:
        PipeplanError: if the plan names a function that nobody allowed, or another one.
    """
    recorded = plan.job.loss
    if recorded in LOSSES:
        if named not in (None, recorded):
            raise PipeplanError(
                f"--loss {_shown(named)}: the plan was made for {recorded!r}; plan again with this "
                "loss in the job file"
            )
        return None
    if named is None:
        raise PipeplanError(
            f"the plan's loss is {recorded!r}; plans are data and import nothing by themselves: if "
            f"you trust it, add --loss {recorded}"
        )
    if callable(named):
        return named
    if named != recorded:
        raise PipeplanError(f"--loss {named}: the plan was made for {recorded!r}")
    return import_loss(plan.job)


def _shown(named: str | Loss | None) -> str:
    return named if isinstance(named, str) else getattr(named, "__name__", repr(named))
