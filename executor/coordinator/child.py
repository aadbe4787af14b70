"""``python -m executor.coordinator.child``: the supervised process; people start its parent.

It follows the log until its parent writes a line, and serves then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from executor.console import show_log
from executor.coordinator.coordinators import coordinator_for
from executor.coordinator.log import Log
from executor.coordinator.serve import Service
from executor.coordinator.store import Meeting, store_is_gone
from executor.coordinator.supervised import Work
from executor.error_line import print_error
from planner.artifacts.plan import Sync
from planner.errors import PipeplanError

_LOOK_S = 0.1


def main() -> int:
    """Serve until the parent ends this process, or is gone itself; returns the exit status."""
    show_log()
    address, prefix, facts, silent_s, log = sys.argv[1:]
    # Ctrl-C is for the parent, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    work = Work(**{**data, "sync": Sync.parse(data["sync"], "sync")})
    sizes = (work.pipelines, work.places, work.pipelines_per_node, work.shares)
    coordinator = coordinator_for(work.sync, *sizes)
    service = Service(coordinator, meeting, Log(log), silent_s)
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        service.follow()
    if sys.stdin.readline():
        service.run()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
