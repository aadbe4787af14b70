"""A 1F1B iteration on single devices, as AutoPipe simulates it: times only, and the critical path.

Much faster than :mod:`planner.simulator`, which also knows shared links, replicas and any order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.partition.chain import FloatArray

MOST_MICROBATCHES_A_STAGE = 4
"""So many microbatches a stage are simulated; further ones repeat the slowest stage's work."""


class Pipeline(NamedTuple):
    """Seconds of one microbatch: by stage, (N,), and by channel to the next stage, (N-1,)."""

    forward_s: FloatArray
    backward_s: FloatArray
    send_s: FloatArray
    send_back_s: FloatArray


class Simulated(NamedTuple):
    """When the last backward ends, and the stage where the critical path computes longest."""

    time_s: float
    critical_stage: int


def simulate_1f1b(pipeline: Pipeline, microbatches: int) -> Simulated:
    """Run 1F1B: stage s of N keeps N - s microbatches in flight."""
    stages = len(pipeline.forward_s)
    counted = min(microbatches, MOST_MICROBATCHES_A_STAGE * stages)
    run = _Run(pipeline, counted)
    steady_s = float((pipeline.forward_s + pipeline.backward_s).max())
    time_s = float(run.ends["B"][:, -1].max()) + (microbatches - counted) * steady_s
    return Simulated(time_s, run.critical_stage())


class _Run:
    """Ends of all operations, ``ends[kind][stage, microbatch]``.

    With unit times and no transfers stage s runs forward m at s + m before its first backward and
    at s + 2m after it, backward m at 2N-1-s + 2m. Any times keep that order, so all
    operations of one such moment are computed at once.
    """

    def __init__(self, pipeline: Pipeline, microbatches: int) -> None:
        self.pipeline = pipeline
        self.stages = len(pipeline.forward_s)
        self.microbatches = microbatches
        shape = (self.stages, microbatches)
        self.ends = {"F": np.zeros(shape), "B": np.zeros(shape)}
        self._free = np.zeros(self.stages)
        for moment in range(2 * (self.stages + microbatches) - 1):
            self._forwards(moment)
            self._backwards(moment)

    def _forwards(self, moment: int) -> None:
        stage = np.arange(self.stages)
        since = moment - stage
        warm_up = (since >= 0) & (since < self.stages - stage)
        steady = (since % 2 == 0) & (since // 2 >= self.stages - stage)
        microbatch = np.where(warm_up, since, since // 2)
        here = stage[(warm_up | steady) & (microbatch < self.microbatches)]
        microbatch = microbatch[here]
        ready = np.where(
            here > 0,
            self.ends["F"][here - 1, microbatch] + np.append(0.0, self.pipeline.send_s)[here],
            0.0,
        )
        self._run("F", here, microbatch, ready, self.pipeline.forward_s)

    def _backwards(self, moment: int) -> None:
        stage = np.arange(self.stages)
        since = moment - (2 * self.stages - 1 - stage)
        here = stage[(since >= 0) & (since % 2 == 0) & (since // 2 < self.microbatches)]
        microbatch = since[here] // 2
        after = np.minimum(here + 1, self.stages - 1)
        ready = np.where(
            here < self.stages - 1,
            self.ends["B"][after, microbatch] + np.append(self.pipeline.send_back_s, 0.0)[here],
            self.ends["F"][here, microbatch],
        )
        self._run("B", here, microbatch, ready, self.pipeline.backward_s)

    def _run(
        self,
        kind: str,
        stage: np.ndarray,
        microbatch: np.ndarray,
        ready: FloatArray,
        seconds: FloatArray,
    ) -> None:
        end = np.maximum(self._free[stage], ready) + seconds[stage]
        self.ends[kind][stage, microbatch] = end
        self._free[stage] = end

    def critical_stage(self) -> int:
        """Follow what each operation waited for, from the last backward to the start."""
        busy_s = np.zeros(self.stages)
        stage, kind = int(self.ends["B"][:, -1].argmax()), "B"
        microbatch = self.microbatches - 1
        while True:
            seconds = self.pipeline.forward_s if kind == "F" else self.pipeline.backward_s
            busy_s[stage] += seconds[stage]
            waits = [self._input(stage, kind, microbatch), self._before(stage, kind, microbatch)]
            known = [wait for wait in waits if wait is not None]
            if not known:
                return int(busy_s.argmax())
            _, stage, kind, microbatch = max(known)

    def _input(self, stage: int, kind: str, microbatch: int) -> _Wait | None:
        """What the operation got its input from, and when."""
        if kind == "F":
            if stage == 0:
                return None
            arrival = self.ends["F"][stage - 1, microbatch] + self.pipeline.send_s[stage - 1]
            return _Wait(float(arrival), stage - 1, "F", microbatch)
        if stage == self.stages - 1:
            return _Wait(float(self.ends["F"][stage, microbatch]), stage, "F", microbatch)
        arrival = self.ends["B"][stage + 1, microbatch] + self.pipeline.send_back_s[stage]
        return _Wait(float(arrival), stage + 1, "B", microbatch)

    def _before(self, stage: int, kind: str, microbatch: int) -> _Wait | None:
        """What ran before the operation on its device."""
        in_flight = self.stages - stage
        if kind == "F":
            before = (
                ("B", microbatch - in_flight) if microbatch >= in_flight else ("F", microbatch - 1)
            )
        elif microbatch + in_flight - 1 < self.microbatches:
            before = ("F", microbatch + in_flight - 1)
        else:
            before = ("B", microbatch - 1) if microbatch else ("F", self.microbatches - 1)
        if before[1] < 0:
            return None
        return _Wait(float(self.ends[before[0]][stage, before[1]]), stage, *before)


class _Wait(NamedTuple):
    until_s: float
    stage: int
    kind: str
    microbatch: int
