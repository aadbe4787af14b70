"""Which scheduler of groups a strategy needs, if any."""

from __future__ import annotations

from planner.artifacts.plan import Sync
from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Scheduler
from planner.sync.strategies import (
    AdPsgdOptions,
    EagerParameterServerOptions,
    ParameterServerOptions,
    SemiDecentralizedOptions,
    options_of,
)

_PATIENT_S = 1e6
_EVERYBODY = SemiDecentralizedOptions(
    first_wait_s=_PATIENT_S,
    least_wait_s=_PATIENT_S,
    most_wait_s=_PATIENT_S,
    guarantee_period=None,
)
"""One group an iteration, of all who are there."""


def scheduler_for(
    sync: Sync, pipelines: int, places: int, pipelines_per_node: int
) -> Scheduler | None:
    """The scheduler of a strategy's groups; None where nobody asks for groups."""
    options = options_of(sync)
    match options:
        case EagerParameterServerOptions():
            return None
        case ParameterServerOptions(mode="async") | AdPsgdOptions(pairs="bipartite"):
            return None
        case ParameterServerOptions():
            options = _EVERYBODY
    return scheduler_of(options, pipelines, places, pipelines_per_node)
