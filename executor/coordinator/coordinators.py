"""The coordinator that a strategy needs, with its scheduler of groups, if any."""

from __future__ import annotations

from executor.coordinator.state import Coordinator
from planner.artifacts.plan import Sync
from planner.sync.groups import scheduler_of
from planner.sync.groups.events import Scheduler
from planner.sync.ledger import ShareLedger
from planner.sync.strategies import (
    AdPsgdOptions,
    EagerParameterServerOptions,
    Options,
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


def coordinator_for(
    sync: Sync, pipelines: int, places: int, pipelines_per_node: int, shares: int
) -> Coordinator:
    """A coordinator at its beginning.

    Args:
        sync: the strategy.
        pipelines: how many.
        places: of each.
        pipelines_per_node: that share a node.
        shares: of data, to be trained once each.
    """
    options = options_of(sync)
    scheduler = _scheduler(options, pipelines, places, pipelines_per_node)
    behind = isinstance(options, SemiDecentralizedOptions) and options.overlap
    ledger = ShareLedger(shares)
    return Coordinator(pipelines, places, ledger, scheduler, averages_behind=behind)


def _scheduler(
    options: Options, pipelines: int, places: int, pipelines_per_node: int
) -> Scheduler | None:
    """None where nobody asks for groups."""
    match options:
        case EagerParameterServerOptions():
            return None
        case ParameterServerOptions(mode="async") | AdPsgdOptions(pairs="bipartite"):
            return None
        case ParameterServerOptions():
            options = _EVERYBODY
    return scheduler_of(options, pipelines, places, pipelines_per_node)
