"""What an iteration was, over all ranks."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.failure import talking_to
from executor.optimisation import Outcome
from executor.recorder import StepRecord
from planner.artifacts.hardware import GIB
from planner.artifacts.plan import Plan


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
        learning_rate: of this step; None where nothing is trained.
        gradient_norm: of the whole model before clipping; None if nobody asked for it.
        skipped: whether the optimizer step was left out, gradients having overflowed in float16.
    """

    step: int
    loss: float
    step_time_s: float
    predicted_time_s: float
    bubble: float
    peak_memory_bytes: int
    learning_rate: float | None = None
    gradient_norm: float | None = None
    skipped: bool = False

    def line(self) -> str:
        """One line for people."""
        norm = "" if self.gradient_norm is None else f"  norm {self.gradient_norm:.3f}"
        skipped = "  overflow: step skipped" if self.skipped else ""
        return (
            f"step {self.step:4d}  loss {self.loss:8.4f}  {self.step_time_s:7.3f} s "
            f"(predicted {self.predicted_time_s:.3f} s)  bubble {100 * self.bubble:3.0f}%  "
            f"memory {self.peak_memory_bytes / GIB:.2f} GiB{norm}{skipped}"
        )


class Gathering:
    """What each rank says of an iteration, on its way to all the others.

    Args:
        plan: that runs.
        step: its number.
        loss: this rank's share of the mean loss.
        record: what this rank did.
        device: of its tensors.
        outcome: of the optimizer step, the same on all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        step: int,
        loss: float,
        record: StepRecord,
        device: torch.device,
        outcome: Outcome | None = None,
    ) -> None:
        self.record = record
        self._plan = plan
        self._step = step
        self._outcome = outcome
        elapsed_s = record.end_s - record.begin_s
        peak = float(peak_memory_bytes(device))
        mine = torch.tensor([loss, record.busy_s, elapsed_s, peak], dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with talking_to(f"the other ranks, at the end of step {step}"):
            self._work = dist.all_gather(self._rows, mine, async_op=True)

    def metrics(self) -> StepMetrics:
        """What the iteration was, once all ranks are done with it; all return the same."""
        with talking_to(f"the other ranks, at the end of step {self._step}"):
            self._work.wait()
        rows = [row.tolist() for row in self._rows]
        losses, busy_s, times_s, peaks = zip(*rows, strict=True)
        step_time_s = max(times_s)
        outcome = self._outcome
        return StepMetrics(
            step=self._step,
            loss=sum(losses),
            step_time_s=step_time_s,
            predicted_time_s=self._plan.predicted.iteration_time_s,
            bubble=min(1.0, max(0.0, 1 - sum(busy_s) / (len(rows) * step_time_s))),
            peak_memory_bytes=int(max(peaks)),
            learning_rate=None if outcome is None else outcome.learning_rate,
            gradient_norm=None if outcome is None else outcome.gradient_norm,
            skipped=outcome is not None and outcome.skipped,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
