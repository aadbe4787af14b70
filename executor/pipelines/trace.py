"""What a pipeline's rank measures of its synchronisation, gathered into one trace."""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from planner.artifacts.plan import Sync
from planner.artifacts.sync_trace import SyncStep, SyncTrace

_GATHER_S = 10.0
"""All ranks end at about the same time."""


class StepTimes:
    """Notes one rank's iterations.

    Args:
        pipeline, place: of the rank.
        store: that all ranks meet at.
    """

    def __init__(self, pipeline: int, place: int, store: Store) -> None:
        self._pipeline = pipeline
        self._place = place
        self._origin_s = float(store.compare_set("trace/origin", "", str(time.time())).decode())
        self._rows: list[dict[str, object]] = []
        self._start_s = self._asked_s = 0.0
        self._members: tuple[int, ...] = ()
        self._iteration = 0

    def begin(self, iteration: int) -> None:
        """An iteration begins; the one before has ended."""
        self.end()
        self._iteration = iteration
        self._start_s = self._asked_s = self._now_s()
        self._members = (self._pipeline,)

    def asks(self) -> None:
        """The local step is done."""
        self._asked_s = self._now_s()

    def met(self, members: tuple[int, ...]) -> None:
        """These synchronised together."""
        if members:
            self._members = members

    def end(self) -> None:
        """The iteration is over."""
        if not self._iteration:
            return
        row = SyncStep(
            iteration=self._iteration,
            key=self._place,
            start_s=self._start_s,
            compute_s=max(0.0, self._asked_s - self._start_s),
            sync_wait_s=max(0.0, self._now_s() - self._asked_s),
            members=self._members,
        )
        self._rows.append(row.model_dump(mode="json"))
        self._iteration = 0

    def _now_s(self) -> float:
        """On the clocks of the hosts, since the first rank was here."""
        return max(0.0, time.time() - self._origin_s)

    def publish(self, store: Store, parameter_bytes: int) -> None:
        """Put what was noted where the trace is gathered."""
        data = {"rows": self._rows, "parameter_bytes": parameter_bytes}
        store.set(_key(self._pipeline, self._place), json.dumps(data))


def save_trace(
    path: Path, store: Store, sync: Sync, pipelines: int, places: int, pipelines_per_node: int
) -> None:
    """Gather what all ranks published, and write it; those who are gone have no rows."""
    rows: list[list[dict[str, object]]] = []
    sizes = [0] * places
    for pipeline in range(pipelines):
        mine = []
        for place in range(places):
            key = _key(pipeline, place)
            if _has_come(store, key):
                data = json.loads(store.get(key))
                sizes[place] = data["parameter_bytes"]
                mine += data["rows"]
        rows.append(sorted(mine, key=lambda row: (row["iteration"], row["key"])))
    SyncTrace.parse(
        {
            "format": "pipeplan-sync-trace/1",
            "sync": sync.model_dump(mode="json"),
            "pipelines_per_node": pipelines_per_node,
            "parameter_bytes": sizes,
            "workers": rows,
        }
    ).save(path)


def _key(pipeline: int, place: int) -> str:
    return f"trace/{pipeline}.{place}"


def _has_come(store: Store, key: str) -> bool:
    until_s = time.monotonic() + _GATHER_S
    while not store.check([key]):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True
