"""What synchronisation took where all ranks are in step, gathered into one trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from executor.place import Place
from executor.recorder import StepRecord
from planner.artifacts.plan import Plan
from planner.artifacts.sync_trace import SyncTrace
from planner.sync.lanes import Lane, lanes_of
from planner.sync.simulation.planned import from_plan


class StepTimes:
    """Notes this rank's iterations; start times of ranks on several hosts are on their own clocks.

    Args:
        plan: that runs, whose replicas form pipelines.
        place: of this process.

    Raises:
        PipeplanError: if they do not.
    """

    def __init__(self, plan: Plan, place: Place) -> None:
        self._plan = plan
        self._place = place
        self._lanes = lanes_of(plan)
        self._rows: list[tuple[float, float, float, float]] = []

    def add(self, step: int, record: StepRecord) -> None:
        """Note an iteration."""
        asked_s = max([record.begin_s, *(span.end_s for span in record.operations)])
        self._rows.append((step, record.begin_s, asked_s, max(asked_s, record.end_s)))

    def save(self, path: str) -> None:
        """Gather all ranks' rows; the first rank writes them."""
        mine = torch.tensor(self._rows, dtype=torch.float64).reshape(-1, 4)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        if self._place.rank == 0:
            self._trace(found).save(Path(path))

    def _trace(self, found: Sequence[Tensor]) -> SyncTrace:
        origin_s = min(float(rows[:, 1].min()) for rows in found if len(rows))
        workers = [list(self._worker(lane, found, origin_s)) for lane in self._lanes]
        world = from_plan(self._plan)
        return SyncTrace.parse(
            {
                "format": "pipeplan-sync-trace/1",
                "sync": self._plan.sync.model_dump(mode="json"),
                "pipelines_per_node": world.pipelines_per_node,
                "parameter_bytes": [place.parameter_bytes for place in world.places],
                "workers": workers,
            }
        )

    def _worker(
        self, lane: Lane, found: Sequence[Tensor], origin_s: float
    ) -> Iterator[dict[str, object]]:
        for key, device in enumerate(lane.devices):
            for step, begin_s, asked_s, end_s in found[self._plan.ranks.index(device)].tolist():
                yield {
                    "iteration": int(step),
                    "key": key,
                    "start_s": begin_s - origin_s,
                    "compute_s": asked_s - begin_s,
                    "sync_wait_s": end_s - asked_s,
                    "members": list(range(len(self._lanes))),
                }
