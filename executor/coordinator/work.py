"""The work that a coordinator hands out, and the coordinator for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.coordinator.state import Coordinator
from planner.plan.plan import Plan, Sync
from planner.sync.groups import scheduler_of
from planner.sync.groups.scheduler import Scheduler
from planner.sync.ledger import WorkUnitLedger
from planner.sync.pipeline_replicas import pipeline_replicas_of, pipelines_per_node
from planner.sync.strategies import (
    AdPsgdOptions,
    EagerParameterServerOptions,
    Options,
    ParameterServerOptions,
    SemiDecentralizedOptions,
    WaveSynchronousOptions,
    options_of,
    overlaps_averages,
)

_PATIENT_S = 1e6
_EVERYBODY = SemiDecentralizedOptions(
    first_wait_s=_PATIENT_S,
    least_wait_s=_PATIENT_S,
    most_wait_s=_PATIENT_S,
    guarantee_period=None,
)
"""One group an iteration, of all who are there."""


@dataclass(frozen=True)
class CoordinatorWork:
    """The work that a coordinator hands out.

    Attributes:
        pipelines: how many.
        places: of each.
        shares: work units, to be trained once each.
        sync: the strategy with its options.
        pipelines_per_node: that share a node.
    """

    pipelines: int
    places: int
    shares: int
    sync: Sync
    pipelines_per_node: int

    @classmethod
    def of_plan(cls, plan: Plan, steps: int, sync: Sync) -> CoordinatorWork:
        """Return the work of some iterations of a plan.

        Raises:
            PipeplanError: if the plan has no pipelines of their own.
        """
        replicas = pipeline_replicas_of(plan)
        shares = max(0, steps) * len(replicas)
        places, per_node = len(replicas[0].devices), pipelines_per_node(replicas)
        return cls(len(replicas), places, shares, sync, per_node)

    def facts(self) -> dict[str, Any]:
        """Return the work as JSON, which all processes compare."""
        return {**vars(self), "sync": self.sync.model_dump(mode="json")}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> CoordinatorWork:
        """Read :meth:`facts`."""
        return cls(**{**facts, "sync": Sync.parse(facts["sync"], "sync")})


def coordinator_for(work: CoordinatorWork) -> Coordinator:
    """Return a coordinator at its beginning."""
    options = options_of(work.sync)
    overlaps = isinstance(options, WaveSynchronousOptions) or overlaps_averages(options)
    return Coordinator(
        work.pipelines,
        work.places,
        WorkUnitLedger(work.shares),
        _scheduler(options, work),
        overlapped_averages=overlaps,
    )


def _scheduler(options: Options, work: CoordinatorWork) -> Scheduler | None:
    """Return the scheduler of groups; None where nobody asks for any."""
    match options:
        case EagerParameterServerOptions():
            return None
        case ParameterServerOptions(mode="async") | AdPsgdOptions(pairs="bipartite"):
            return None
        case ParameterServerOptions():
            options = _EVERYBODY
    return scheduler_of(options, work.pipelines, work.places, work.pipelines_per_node)
