"""The loop over iterations: their metrics over all ranks, and what is reported of them."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from executor.distributed.failure import talking_to
from executor.distributed.stop import StopRequest
from executor.runtime.runtime import PendingRecord, StepRecord
from executor.training.agreement import require_same_batches
from executor.training.master_weights import require_finite
from executor.training.optimisation import StepOutcome
from planner.cluster.hardware import GIB
from planner.costs.throughput import Throughput, throughput
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.records.document import read_text, require_file_path, write_atomically
from planner.units import four_digits


@dataclass(frozen=True)
class StepMetrics:
    """One iteration, over all ranks.

    Attributes:
        step: its number, from 1.
        loss: mean over all microbatches.
        step_time_s: of the slowest rank, the optimizer step included.
        predicted_time_s: what the plan says.
        bubble: mean share of the iteration that ranks did not compute.
        peak_memory_bytes: the most any rank has held so far: of a GPU what tensors took, on a CPU
            the whole process.
        throughput: of an iteration of this time; None if it took none.
        learning_rate: of this step; None where nothing is trained.
        gradient_norm: of the whole model before clipping; None if nobody asked for it.
        skipped: whether the optimizer step was left out, its gradients not being finite.
        validation_loss: mean on the validation's data after this step; None if it had none.
    """

    step: int
    loss: float
    step_time_s: float
    predicted_time_s: float
    bubble: float
    peak_memory_bytes: int
    throughput: Throughput | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    skipped: bool = False
    validation_loss: float | None = None

    def line(self) -> str:
        """One line for people."""
        norm = "" if self.gradient_norm is None else f"  norm {self.gradient_norm:.3f}"
        skipped = "  gradient not finite: step skipped" if self.skipped else ""
        if self.validation_loss is not None:
            skipped += f"  validation {self.validation_loss:.4f}"
        return (
            f"step {self.step:4d}  loss {self.loss:8.4f}  {self.step_time_s:7.3f} s "
            f"(predicted {self.predicted_time_s:.3f} s)  bubble {100 * self.bubble:3.0f}%  "
            f"memory {self.peak_memory_bytes / GIB:.2f} GiB{self._throughput()}{norm}{skipped}"
        )

    def _throughput(self) -> str:
        """Return tokens or else samples a second, and MFU where peaks are known."""
        found = self.throughput
        if found is None:
            return ""
        rate, unit = found.tokens_per_s, "tokens/s"
        if rate is None:
            rate, unit = found.samples_per_s, "samples/s"
        mfu = "" if found.mfu is None else f"  MFU {found.mfu:.1%}"
        return f"  {four_digits(rate)} {unit}{mfu}"


class HostNumbers:
    """Scalars of a device, on their way to the host; nothing waits until they are read.

    Args:
        scalars: that the device computes.
        device: whose stream, for a GPU, has passed when :meth:`read` is called.
    """

    def __init__(self, scalars: Sequence[Tensor], device: torch.device) -> None:
        found = [scalar.detach().double().reshape(()) for scalar in scalars]
        if device.type == "cuda":
            pinned = [torch.empty_like(x, device="cpu", pin_memory=True) for x in found]
            found = [to.copy_(x, non_blocking=True) for to, x in zip(pinned, found, strict=True)]
        self._scalars = found

    def read(self) -> list[float]:
        """The numbers."""
        return [float(scalar) for scalar in self._scalars]


class Gathering:
    """Each rank's part of an iteration's metrics, on its way to all the others.

    Args:
        plan: that runs.
        step: its number.
        record: what this rank did.
        loss: this rank's share of the mean loss, a scalar that the device may have yet to compute.
        device: of its tensors.
        outcome: of the optimizer step, the same on all ranks but for its own norm.
        digests: of the iteration's batches, of :meth:`CheckedBatches.take`.

    Attributes:
        stop: number of a signal that asked any rank to stop, once :meth:`metrics` has returned.
        validation_loss: of a validation after the iteration, if it has one.
    """

    stop = 0
    validation_loss: float | None = None

    def __init__(
        self,
        plan: Plan,
        step: int,
        record: PendingRecord,
        loss: Tensor,
        device: torch.device,
        outcome: StepOutcome,
        digests: Sequence[float] = (),
    ) -> None:
        self._plan = plan
        self._step = step
        self._record = record
        norm = torch.zeros(()) if outcome.own_norm is None else outcome.own_norm
        self._numbers = HostNumbers([loss, norm], device)
        self._device = device
        self._outcome = outcome
        self._digests = digests
        self._rows: list[Tensor] = []
        self._work: Any = None

    @property
    def record(self) -> StepRecord:
        """What this rank did."""
        return self._record.wait()

    def start(self, stop: int = 0) -> None:
        """Wait until this rank's iteration has ended, and start to tell the others.

        Args:
            stop: number of a signal that asks this rank to stop; 0: none.
        """
        if self._work is not None:
            return
        record = self.record
        loss, norm = self._numbers.read()
        elapsed_s = record.end_s - record.begin_s
        peak = float(peak_memory_bytes(self._device))
        told = [loss, record.busy_s, elapsed_s, peak, stop, norm, *self._digests]
        mine = torch.tensor(told, dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with talking_to(f"the other ranks, at the end of step {self._step}"):
            self._work = dist.all_gather(self._rows, mine, async_op=True)

    def metrics(self) -> StepMetrics:
        """Wait for all ranks, and return the iteration's metrics, the same on all.

        Raises:
            PipeplanError: on all ranks alike, if the loss or a gradient is not finite and the step
                was not left out, or if ranks have read different batches.
        """
        self.start()
        with talking_to(f"the other ranks, at the end of step {self._step}"):
            self._work.wait()
        rows = [row.tolist() for row in self._rows]
        losses, busy_s, times_s, peaks, stops, norms, *digests = zip(*rows, strict=True)
        self.stop = int(max(stops))
        require_same_batches(self._step, digests)
        if not self._outcome.skipped:
            require_finite(self._step, sum(losses), norms)
        step_time_s, plan = max(times_s), self._plan
        return StepMetrics(
            step=self._step,
            loss=sum(losses),
            step_time_s=step_time_s,
            predicted_time_s=plan.predicted.iteration_time_s,
            bubble=min(1.0, max(0.0, 1 - sum(busy_s) / (len(rows) * step_time_s))),
            peak_memory_bytes=int(max(peaks)),
            throughput=throughput(
                plan.model.graph, plan.cluster, plan.job, plan.rank_devices, step_time_s
            ),
            learning_rate=self._outcome.learning_rate,
            gradient_norm=None if self._outcome.gradient_norm is None else norms[0],
            skipped=self._outcome.skipped,
            validation_loss=self.validation_loss,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


logger = logging.getLogger(__name__)


class StepReport:
    """Logs every step, and writes it to a file if there is one.

    The file is begun with the first step; a training that goes on from a checkpoint keeps
    the lines of the steps before it.

    Args:
        path: of the file, or None.
        resumes: whether steps before the first one that is reported may be in the file.

    Raises:
        PipeplanError: if the file cannot be written, or holds something else that would be lost.
    """

    def __init__(self, path: Path | None, *, resumes: bool) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []
        self._has_begun = False
        if path is not None:
            require_file_path(path)
            if resumes and path.exists():
                self._lines = _lines_of(path)

    def __call__(self, metrics: StepMetrics) -> None:
        """Report one step."""
        logger.info("%s", metrics.line())
        if self._path is not None:
            self._write(self._path, metrics)

    def _write(self, path: Path, metrics: StepMetrics) -> None:
        if not self._has_begun:
            self._has_begun = True
            if metrics.step > 1 and path.exists():
                # The ranks of another host may have been started again, and not this one.
                self._lines = _lines_of(path)
            kept = [line for line in self._lines if line["step"] < metrics.step]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        with path.open("a") as file:
            file.write(json.dumps(_plain(metrics), allow_nan=False) + "\n")


def _plain(metrics: StepMetrics) -> dict[str, Any]:
    """JSON has no word for what is not finite: it becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(metrics).items()
    }


def _lines_of(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(text) for text in read_text(path).splitlines()]
        if not all(isinstance(line["step"], int) for line in lines):
            raise ValueError("a step that is no number")
    except (ValueError, TypeError, KeyError) as error:
        raise PipeplanError(
            f"{path}: not the metrics of a training ({error}), and resuming would add to it; give "
            "another --metrics file"
        ) from None
    return lines


Report = Callable[[StepMetrics], None]


class Stepper(Protocol):
    """Something that runs iterations."""

    def iterate(self, step: int) -> Gathering:
        """Run one iteration; ranks wait for each other only if their strategy does."""


class StepObserver(Protocol):
    """Something that notes what iterations were, and writes it at the end."""

    def add(self, metrics: StepMetrics, record: StepRecord) -> None:
        """Note an iteration of this rank."""

    def save(self) -> None:
        """Write what all ranks have noted; all ranks call it."""


class Loop:
    """Runs iterations of synchronous or decentralized training, or of an emulation.

    Args:
        report: called on every rank with the metrics of every iteration.
        observers: note every iteration on every rank.
        lag: iterations that ranks may be apart; their metrics are waited for so much later.
        late: iterations that a device may be behind its host; theirs are asked for so much later,
            when a GPU has its next iteration to work on.
        stop: what asks this rank to stop; all ranks end after the same iteration then.
        loss_of: returns the loss to be told of an iteration, by its number and its own loss.

    Attributes:
        history: the metrics of the iterations so far.
        end: the iteration after which a signal ends the training; None: it goes on.
    """

    def __init__(
        self,
        report: Report | None,
        observers: Sequence[StepObserver] = (),
        *,
        lag: int = 0,
        late: int = 0,
        stop: StopRequest | None = None,
        loss_of: Callable[[int, float], float] = lambda step, loss: loss,
    ) -> None:
        self._loss_of = loss_of
        self.history: list[StepMetrics] = []
        self.end: int | None = None
        self._stop = stop or StopRequest(None)
        self._report = report
        self._observers = observers
        self._lag = lag
        self._late = late
        self._first = 1
        self._gathering: list[Gathering] = []

    def run(
        self,
        stepper: Stepper,
        steps: Iterable[int],
        after: Callable[[int], None] = lambda step: None,
        validate: Callable[[int], float | None] = lambda step: None,
        *,
        first: int = 1,
    ) -> list[StepMetrics]:
        """Run iterations.

        Args:
            stepper: runs one.
            steps: their numbers in the whole training.
            after: called with the number of each once it is done.
            validate: called before that; returns the loss of a validation, or None.
            first: number of the first one in the metrics, which count on from there.

        Returns:
            The metrics of every iteration.
        """
        self._first = first
        for step in steps:
            self._gathering.append(stepper.iterate(step))
            self._gathering[-1].validation_loss = validate(step)
            self._start_all_but(self._late)
            self._report_all_but(self._late + self._lag)
            self.end = step if self._stop.agreed else None
            after(step)
            if self._stop.agreed:  # It may have come to be known while a checkpoint was written.
                self.end = step
                break
        self._report_all_but(0)
        if self.history:
            for observer in self._observers:
                observer.save()
        return self.history

    def catch_up(self) -> None:
        """Wait for all ranks, so that what is wrong with the iterations so far is known.

        Raises:
            PipeplanError: if one of them diverged.
        """
        self._start_all_but(0)
        self._report_all_but(0)

    def _start_all_but(self, left: int) -> None:
        """Ask for the metrics of all iterations but the last ``left``."""
        for gathering in self._gathering[: len(self._gathering) - left]:
            gathering.start(self._stop.number)

    def _report_all_but(self, left: int) -> None:
        """Report all iterations but the last ``left``."""
        while len(self._gathering) > left:
            gathering = self._gathering.pop(0)
            metrics, step = gathering.metrics(), self._first + len(self.history)
            metrics = replace(metrics, step=step, loss=self._loss_of(step, metrics.loss))
            self._stop.agreed = self._stop.agreed or gathering.stop
            self.history.append(metrics)
            for observer in self._observers:
                observer.add(metrics, gathering.record)
            if self._report is not None:
                self._report(metrics)
