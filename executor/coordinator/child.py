"""``python -m executor.coordinator.child``: the supervised process; people start its parent."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from executor.coordinator.log import MessageLog
from executor.coordinator.serve import Service
from executor.coordinator.state import Coordinator
from executor.coordinator.store import Meeting, store_is_gone
from executor.coordinator.supervised import CoordinatorWork
from executor.launch.console import print_error, show_log
from planner.errors import PipeplanError
from planner.plan.plan import Sync
from planner.sync.groups import scheduler_of
from planner.sync.groups.scheduler import Scheduler
from planner.sync.ledger import WorkUnitLedger
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
    overlaps = isinstance(options, WaveSynchronousOptions) or overlaps_averages(options)
    ledger = WorkUnitLedger(shares)
    return Coordinator(pipelines, places, ledger, scheduler, overlapped_averages=overlaps)


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


def main() -> int:
    """Serve until the parent ends this process, or is gone itself; returns the exit status."""
    show_log()
    address, prefix, facts, silent_s, log = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    meeting = Meeting.parse(address, prefix)
    try:
        _serve(meeting, json.loads(facts), float(silent_s), Path(log))
    except PipeplanError as error:
        print_error("; ".join(error.problems))
    except DistError:
        print_error(store_is_gone(str(meeting)))
    except OSError as error:
        print_error(f"{log}: cannot be read or written ({error.strerror}); name another --log file")
    return 1


def _serve(meeting: Meeting, data: dict[str, Any], silent_s: float, log: Path) -> None:
    work = CoordinatorWork(**{**data, "sync": Sync.parse(data["sync"], "sync")})
    sizes = (work.pipelines, work.places, work.pipelines_per_node, work.shares)
    coordinator = coordinator_for(work.sync, *sizes)
    Service(coordinator, meeting, MessageLog(log), silent_s).run()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
