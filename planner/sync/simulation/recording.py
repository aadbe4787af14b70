"""Takes down a simulated run in the form in which a real one is measured."""

from __future__ import annotations

from planner.artifacts.sync_trace import SyncStep


class Recorder:
    """Rows of every worker's iterations, by worker."""

    def __init__(self, workers: int) -> None:
        self.rows: list[list[SyncStep]] = [[] for _ in range(workers)]
        self._open: dict[tuple[int, int], tuple[int, float, float]] = {}

    def begin(self, worker: int, key: int, iteration: int, start_s: float, ended_s: float) -> None:
        """A place computes from ``start_s`` until ``ended_s``."""
        self._open[worker, key] = (iteration, start_s, ended_s)

    def free(self, worker: int, key: int, now_s: float, members: tuple[int, ...]) -> None:
        """A place has synchronised with these workers."""
        iteration, start_s, ended_s = self._open.pop((worker, key))
        self.rows[worker].append(
            SyncStep(
                iteration=iteration,
                key=key,
                start_s=max(start_s, 0.0),
                compute_s=ended_s - start_s,
                sync_wait_s=max(now_s - ended_s, 0.0),
                members=members or (worker,),
            )
        )
