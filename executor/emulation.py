"""Emulation: operations take their predicted time and compute nothing, messages are real.

For schedules and networks of machines one does not have. An operation starts when its input is
there and the operation before it has ended, and ends its predicted duration later; the wait for
that moment absorbs how late the sleep before it woke, so that lateness does not add up.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from executor.arrivals import WatchedTransport
from executor.clock import HostClock
from executor.lower import Reduce, lower
from executor.metrics import StepMetrics, gather_metrics
from executor.place import Place
from executor.recorder import Recorder, StepRecord
from executor.runtime import PipelineRuntime
from executor.sync.all_reduce import BUCKET_BYTES, AllReduce
from executor.sync.groups import make_process_groups
from executor.transport import DirectTransport, Transport
from executor.worker import TensorSpec
from planner.artifacts.layer_graph import Boundary
from planner.artifacts.plan import Plan
from planner.costs.placement import PlacedPipeline, Synchronisation, place_plan

_AT_ONCE_S = 1e-4
"""A wait shorter than this found its message there."""


class DeviceTime:
    """When the emulated device is free again, in :func:`time.perf_counter` seconds."""

    def __init__(self) -> None:
        self._free_at_s = 0.0
        self._ready_s = 0.0

    def waited(self, start_s: float, end_s: float) -> None:
        """The next operation's input was waited for from ``start_s`` to ``end_s``."""
        self._ready_s = end_s if end_s - start_s > _AT_ONCE_S else 0.0

    def begin(self) -> None:
        """An iteration starts now."""
        self._free_at_s = time.perf_counter()
        self._ready_s = 0.0

    def take(self, seconds: float) -> None:
        """Be busy for some time from when the device is free and the input was there."""
        self._free_at_s = max(self._free_at_s, self._ready_s) + seconds
        self._ready_s = 0.0
        left = self._free_at_s - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def idle_until_now(self) -> None:
        """What comes next starts now: the device has waited for something else."""
        self._free_at_s = max(self._free_at_s, time.perf_counter())


class EmulatedWorker:
    """A stage that takes its time and hands on tensors of the right shapes.

    Args:
        pipeline: the placed plan.
        index: of the stage.
        device: whose times count.
        split: the microbatches whose backward runs in two halves.
        clock: of that device, shared by its stages.
    """

    def __init__(
        self,
        pipeline: PlacedPipeline,
        index: int,
        device: str,
        split: Collection[int],
        clock: DeviceTime,
    ) -> None:
        self.split = frozenset(split)
        self.times = pipeline.stages[index].times[device]
        self.clock = clock
        self.is_last = index == len(pipeline.stages) - 1
        received = _crossing(pipeline, index)
        sent = [] if self.is_last else _crossing(pipeline, index + 1)
        self.incoming: Sequence[TensorSpec] = [_spec(tensor) for tensor in received]
        self.returning: Sequence[TensorSpec] = [_spec(t) for t in sent if t.requires_grad]
        self._outputs = [_empty(_spec(tensor)) for tensor in sent]
        self._gradients = [_empty(_spec(t)) for t in received if t.requires_grad]

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors for the next stage, or a loss of zero."""
        self._take("F")
        return (torch.zeros(()),) if self.is_last else tuple(self._outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for the stage before."""
        self._take("I" if microbatch in self.split else "B")
        return tuple(self._gradients)

    def weight_gradients(self, microbatch: int) -> None:
        """The second half of a split backward."""
        self._take("W")

    def require_empty(self) -> None:
        """Nothing is kept."""

    def _take(self, kind: str) -> None:
        self.clock.take(self.times.seconds(kind))


def _crossing(pipeline: PlacedPipeline, index: int) -> list[Boundary]:
    """What a stage receives, as the layer graph says."""
    before = [layer for stage in pipeline.stages[:index] for layer in stage.spec.layers]
    return list(pipeline.problem.graph.crossing(before)) if index else []


def _spec(tensor: Boundary) -> TensorSpec:
    return TensorSpec(tensor.shape, getattr(torch, tensor.dtype))


def _empty(spec: TensorSpec) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype)


class Emulator:
    """This rank's part of a plan, emulated; the process group exists.

    Args:
        plan: verified.
        place: of this process.
        timeout: of collectives.
        watch: whether arrivals of messages are noted, for a timeline.

    Attributes:
        record: what this rank did in the last iteration.
    """

    def __init__(
        self, plan: Plan, place: Place, timeout: timedelta | None = None, *, watch: bool = False
    ) -> None:
        self.plan = plan
        self.device = plan.ranks[place.rank]
        self.record = StepRecord()
        pipeline = place_plan(plan)
        self._optimizer_s = pipeline.optimizer_s[self.device]
        self._recorder = Recorder(HostClock())
        self._time = DeviceTime()
        groups = {_reduce_of(plan, sync): sync.bytes for sync in pipeline.synchronisations}
        self._reduce = AllReduce(
            {r: _buffers(size) for r, size in groups.items() if place.rank in r.ranks},
            make_process_groups((r.ranks for r in groups), timeout),
            self._recorder,
        )
        order = plan.parsed_orders()[self.device]
        workers = {}
        for index in pipeline.stages_on[self.device]:
            split = {op.microbatch for op in order if op.stage == index and op.kind == "W"}
            workers[index] = EmulatedWorker(pipeline, index, self.device, split, self._time)
        transport: Transport = DirectTransport(torch.device("cpu"))
        self._runtime = PipelineRuntime(
            workers,
            lower(plan)[place.rank],
            self._reduce.start,
            WatchedTransport(transport) if watch else transport,
            self._recorder,
            self._time.waited,
        )

    def step(self, step: int) -> StepMetrics:
        """One iteration; all ranks return the same metrics."""
        self._recorder.begin()
        self._time.begin()
        self._runtime.step()
        self._reduce.finish()
        start = self._recorder.mark()
        self._time.idle_until_now()
        self._time.take(self._optimizer_s)
        self._recorder.note("optimizer", None, start)
        self.record = self._recorder.record()
        return gather_metrics(self.plan, step, 0.0, self.record, torch.device("cpu"))


def _reduce_of(plan: Plan, sync: Synchronisation) -> Reduce:
    rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
    return Reduce(sync.stages, tuple(sorted(rank_of[device] for device in sync.devices)))


def _buffers(size: int) -> list[Tensor]:
    """Gradients of so many bytes."""
    sizes = [min(BUCKET_BYTES, size - offset) for offset in range(0, size, BUCKET_BYTES)]
    return [torch.zeros(-(-bytes_ // 4)) for bytes_ in sizes]
