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

from executor.coordinator.coordinators import coordinator_for
from executor.coordinator.log import Log
from executor.coordinator.serve import Service
from executor.coordinator.store import Meeting
from executor.coordinator.supervised import Work
from planner.artifacts.plan import Sync

_LOOK_S = 0.1


def main() -> None:
    """Serve until the parent ends this process, or is gone itself."""
    address, prefix, facts, silent_s, log = sys.argv[1:]
    # Ctrl-C is for the parent, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    data = json.loads(facts)
    work = Work(**{**data, "sync": Sync.parse(data["sync"], "sync")})
    sizes = (work.pipelines, work.places, work.pipelines_per_node, work.shares)
    coordinator = coordinator_for(work.sync, *sizes)
    meeting = Meeting.parse(address, prefix)
    service = Service(coordinator, meeting, Log(Path(log)), float(silent_s))
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        service.follow()
    if sys.stdin.readline():
        service.run()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
