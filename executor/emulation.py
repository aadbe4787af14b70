"""Emulation: operations take their predicted time and compute nothing, messages are real.

For schedules and networks of machines one does not have. An operation starts when its input is
there and the operation before it has ended, and ends its predicted duration later; the wait for
that moment absorbs how late the sleep before it woke, so that lateness does not add up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import inf

import torch
from torch import Tensor, nn

from executor.arrivals import WatchedTransport
from executor.clock import HostClock
from executor.device_time import DeviceTime
from executor.layer_moments import LayerMoments
from executor.lower import Action, Reduce, lower
from executor.metrics import Gathering, StepMetrics
from executor.optimisation import Optimisation, Outcome
from executor.optimizer import job_optimizer
from executor.pace import Pace
from executor.place import Place
from executor.recorder import Recorder, StepRecord
from executor.runtime import PipelineRuntime
from executor.sync import Setting, Synchronisation, make_strategy
from executor.sync.buckets import SharedGradients
from executor.sync.groups import make_process_groups, own_shares, shared_parameters
from executor.sync.readiness import last_backwards
from executor.transport import DirectTransport, Transport
from executor.worker import TensorSpec
from planner.artifacts.graph_record import Boundary, Parameter
from planner.artifacts.operations import Kind, Operation
from planner.artifacts.plan import Plan
from planner.costs.placement import PlacedPipeline, place_plan
from planner.sync.strategies import options_of


class EmulatedWorker:
    """A stage that takes its time and hands on tensors of the right shapes.

    Args:
        pipeline: the placed plan.
        index: of the stage.
        device: whose times count.
        split: the microbatches whose backward runs in two halves.
        clock: of that device, shared by its stages.
        synchronisation: told when gradients would be complete and parameters are needed.
        moments: of the layers whose parameters others share; None: nobody wants to know.
        last: by the stage's operations, the parameters whose gradients get their last part in it.
    """

    def __init__(
        self,
        pipeline: PlacedPipeline,
        index: int,
        device: str,
        split: Collection[int],
        clock: DeviceTime,
        synchronisation: Synchronisation,
        moments: LayerMoments,
        last: Mapping[Operation, Collection[str]],
    ) -> None:
        self.index = index
        self.synchronisation = synchronisation
        self.moments = moments
        self.last = last
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
        self.clock.begin_operation()
        for name, seconds in self.moments.needed.items() if self.synchronisation.gated else ():
            self.clock.reach(seconds)
            self.synchronisation.before_use([name])
        self.clock.reach(self.times.forward_s)
        return (torch.zeros(()),) if self.is_last else tuple(self._outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients for the stage before."""
        self._take("I" if microbatch in self.split else "B", microbatch)
        return tuple(self._gradients)

    def weight_gradients(self, microbatch: int) -> None:
        """The second half of a split backward."""
        self._take("W", microbatch)

    def require_empty(self) -> None:
        """Nothing is kept."""

    def _take(self, kind: Kind, microbatch: int) -> None:
        """Let the time pass, and tell of each gradient that gets its last part."""
        names = self.last.get(Operation(self.index, kind, microbatch), ())
        self.clock.begin_operation()
        for name, seconds in self.moments.complete.get(kind, {}).items() if names else ():
            if name in names:
                self.clock.reach(seconds)
                self.synchronisation.ready(name)
        self.clock.reach(self.times.seconds(kind))


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

    Its parameters have no values, their gradients are zeros.

    Args:
        plan: verified.
        place: of this process.
        timeout: of collectives.
        watch: whether arrivals of messages are noted, for a timeline.
        pace: how operations differ from their predicted time.

    Attributes:
        record: what this rank did in the last iteration.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        timeout: timedelta | None = None,
        *,
        watch: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.plan = plan
        self.place = place
        self.device = plan.ranks[place.rank]
        self.record = StepRecord()
        self.pace = pace or Pace()
        self._pipeline = place_plan(plan)
        self._optimizer_s = self._pipeline.optimizer_s[self.device]
        self._recorder = Recorder(HostClock())
        # Ranks that share a processor make up for what they lost to each other.
        self._time = self.pace.time_of(place.rank, most_late_s=inf)
        program = lower(plan)[place.rank]
        shared = self._shared(program)
        self._synchronisation = self._strategy(shared, timeout)
        transport: Transport = DirectTransport(torch.device("cpu"))
        self._runtime = PipelineRuntime(
            self._workers(shared),
            program,
            self._synchronisation.start,
            WatchedTransport(transport) if watch else transport,
            self._recorder,
            self._time.waited,
        )

    def _shared(self, program: Sequence[Action]) -> list[SharedGradients]:
        graph = self._pipeline.problem.graph
        names = {row.reduce: row.names for row in shared_parameters(self.plan)}
        return [
            SharedGradients(action, {n: _empty_parameter(graph.parameters[n]) for n in row})
            for action in program
            if isinstance(action, Reduce)
            for row in [names[action]]
        ]

    def _strategy(
        self, shared: Sequence[SharedGradients], timeout: timedelta | None
    ) -> Synchronisation:
        sets = (row.ranks for row in shared_parameters(self.plan))
        setting = Setting(
            options_of(self.plan.sync),
            shared,
            make_process_groups(sets, timeout),
            self._recorder,
            Optimisation({}, frozenset(), partial(job_optimizer, self.plan.job)),
            own_shares(self.plan, self.place.rank),
        )
        return make_strategy(self.plan, setting)

    def _workers(self, shared: Sequence[SharedGradients]) -> dict[int, EmulatedWorker]:
        order = self.plan.parsed_orders()[self.device]
        users = {name: row.reduce.stages for row in shared for name in row.parameters}
        last = last_backwards(order, users)
        workers = {}
        for index in self._pipeline.stages_on[self.device]:
            workers[index] = EmulatedWorker(
                self._pipeline,
                index,
                self.device,
                {op.microbatch for op in order if op.stage == index and op.kind == "W"},
                self._time,
                self._synchronisation,
                LayerMoments.of(self._pipeline, index, self.device, users),
                last if self._synchronisation.announced else {},
            )
        return workers

    def step(self, step: int) -> StepMetrics:
        """One iteration; all ranks wait for each other's metrics."""
        return self.iterate(step).metrics()

    def iterate(self, step: int) -> Gathering:
        """One iteration, after which ranks wait for each other only if their strategy does."""
        self._recorder.begin()
        self._time.begin(self.pace.pause_s(self.place.rank, step))
        self._synchronisation.begin(step)
        self._runtime.step()
        self._synchronisation.finish()
        start = self._recorder.mark()
        self._synchronisation.update(lambda: Outcome(0.0, None, skipped=False))
        self._time.idle_until_now()
        self._time.take(self._optimizer_s)
        self._recorder.note("optimizer", None, start)
        self.record = self._recorder.record()
        return Gathering(self.plan, step, 0.0, self.record, torch.device("cpu"))

    def close(self) -> None:
        """No iteration follows; all ranks call it."""
        self._synchronisation.settle()
        self._synchronisation.close()


def _empty_parameter(parameter: Parameter) -> nn.Parameter:
    """A parameter of so many bytes that takes up no memory."""
    return nn.Parameter(torch.zeros(1).expand(-(-parameter.bytes // 4)))
