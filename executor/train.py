"""Training by a plan: set up this rank, run iterations, report."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from executor.cut import cut
from executor.data import BatchOf, Source, batches
from executor.lower import lower
from executor.model import Factory, allowed_factory, build_model, export_planned_model
from executor.runtime import PipelineRuntime
from executor.sync import STRATEGIES
from executor.sync.groups import make_groups
from planner.artifacts.hardware import GIB
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.verifier import require_valid


@dataclass(frozen=True)
class StepMetrics:
    """One iteration, over all ranks.

    ``bubble`` is the mean share of the iteration that ranks did not compute;
    ``peak_memory_bytes`` the most any rank's process has held so far.
    """

    step: int
    loss: float
    step_time_s: float
    predicted_time_s: float
    bubble: float
    peak_memory_bytes: int

    def line(self) -> str:
        """One line for people."""
        return (
            f"step {self.step:4d}  loss {self.loss:8.4f}  {self.step_time_s:7.3f} s "
            f"(predicted {self.predicted_time_s:.3f} s)  bubble {100 * self.bubble:3.0f}%  "
            f"process {self.peak_memory_bytes / GIB:.2f} GiB"
        )


class Trainer:
    """This rank's part of training by a plan.

    Args:
        plan: verified before anything else happens.
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        seed: of weights and data.

    Raises:
        PipeplanError: if the plan does not hold, needs what the executor cannot do, or is for
            another model; before any message is sent.

    Attributes:
        parameters: those this rank holds, by the model's own names (FQNs).
        model: the whole model, of which only these parameters keep their data.
    """

    def __init__(self, plan: Plan, model: str | Factory | None = None, *, seed: int = 0) -> None:
        require_runnable(plan)
        self.plan = plan
        self.seed = seed
        self.rank = dist.get_rank()
        self.device = torch.device("cpu")
        if dist.get_world_size() != len(plan.ranks):
            raise PipeplanError(world_size_message(plan, dist.get_world_size()))
        self.model = build_model(plan, allowed_factory(plan, model), seed, self.device)
        exported, layers = export_planned_model(plan, self.model, self.device)
        mine = [s.index for s in plan.stages if plan.ranks[self.rank] in s.devices]
        stages = cut(exported, layers, plan, mine)
        program = lower(plan)[self.rank]
        self.runtime = PipelineRuntime(stages, program, plan.microbatches, self.device)
        self.parameters: dict[str, nn.Parameter] = {}
        for stage in stages:
            self.parameters.update(stage.parameters)
        _release_others(self.model, self.parameters)
        # Weights are drawn alike on all ranks; what training draws (dropout) must not be alike.
        torch.manual_seed(seed + 1_000_003 * (self.rank + 1))
        groups = make_groups(plan, self.rank, self.parameters)
        self.synchronisation = STRATEGIES[plan.sync.strategy](groups)
        self.optimizer = make_optimizer(plan, self.parameters)

    def forward_backward(self, step: int, batch_of: BatchOf) -> tuple[float, float]:
        """All microbatches of one iteration and the synchronisation of their gradients.

        Returns:
            This rank's share of the mean loss, and its seconds of computation.
        """
        self.optimizer.zero_grad(set_to_none=True)
        report = self.runtime.step(lambda microbatch: batch_of(step, microbatch))
        self.synchronisation.reduce()
        return report.loss, report.busy_s

    def step(self, step: int, batch_of: BatchOf) -> StepMetrics:
        """One iteration with its optimizer step; all ranks return the same metrics."""
        begin = time.perf_counter()
        loss, busy_s = self.forward_backward(step, batch_of)
        self.optimizer.step()
        elapsed_s = time.perf_counter() - begin
        sums = torch.tensor([loss, busy_s], dtype=torch.float64)
        dist.all_reduce(sums)
        most = torch.tensor([elapsed_s, _peak_memory_bytes()], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        step_time_s = float(most[0])
        share = float(sums[1]) / (len(self.plan.ranks) * step_time_s)
        return StepMetrics(
            step=step,
            loss=float(sums[0]),
            step_time_s=step_time_s,
            predicted_time_s=self.plan.predicted.iteration_time_s,
            bubble=min(1.0, max(0.0, 1 - share)),
            peak_memory_bytes=int(most[1]),
        )


def train(
    plan: Plan,
    model: str | Factory | None = None,
    *,
    steps: int = 20,
    data: Source | BatchOf = "text",
    seed: int = 0,
    report: Callable[[StepMetrics], None] | None = None,
) -> list[StepMetrics]:
    """Train for some iterations in a process group that exists already.

    Args:
        plan: what to run; one rank a device of ``plan.ranks``.
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        steps: number of iterations.
        data: ``text``, ``random``, or a function ``(step, microbatch) -> batch``.
        seed: of weights and data.
        report: called on every rank after every iteration.

    Raises:
        PipeplanError: if the plan cannot be run.
    """
    trainer = Trainer(plan, model, seed=seed)
    batch_of = data if callable(data) else batches(data, trainer.model, plan.job, seed)
    history = []
    for step in range(1, steps + 1):
        metrics = trainer.step(step, batch_of)
        history.append(metrics)
        if report is not None:
            report(metrics)
    return history


def require_runnable(plan: Plan) -> None:
    """Refuse what this executor cannot do, and plans that do not hold.

    Raises:
        PipeplanError: naming the field and the remedy.
    """
    require_valid(plan)
    problems = []
    if plan.job.precision != "float32":
        problems.append(
            f"job.precision: the executor trains in float32 only so far, the plan says "
            f'{plan.job.precision!r}; plan with precision = "float32" to run it'
        )
    for stage in plan.stages:
        if stage.recompute:
            problems.append(
                f"stages[{stage.index}].recompute: the executor cannot recompute layers yet; "
                "plan again with recompute = false in the job file"
            )
    for device, order in plan.parsed_orders().items():
        if any(operation.kind in "IW" for operation in order):
            problems.append(
                f"orders[{device!r}]: the executor cannot run split backwards (I and W) yet; "
                "use whole backwards (B)"
            )
    if problems:
        raise PipeplanError(problems)


def _release_others(model: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
    """Free the weights that other ranks hold; the model stays to describe its batches."""
    mine = {id(parameter) for parameter in held.values()}
    for parameter in model.parameters():
        if id(parameter) not in mine:
            parameter.data = parameter.data.new_empty(0)


def world_size_message(plan: Plan, found: int) -> str:
    """What to do when the number of processes does not fit the plan."""
    count = len(plan.ranks)
    return (
        f"the plan has {count} ranks, {found} processes were started; run it with "
        f"torchrun --nproc-per-node {count} -m executor PLAN"
    )


def make_optimizer(plan: Plan, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The job's optimizer over this rank's parameters."""
    # An empty list is refused by torch; a rank may hold no parameter at all.
    held = list(parameters.values()) or [nn.Parameter(torch.zeros(0))]
    rate = plan.job.learning_rate
    if plan.job.optimizer == "adamw":
        return torch.optim.AdamW(held, lr=rate)
    momentum = 0.9 if plan.job.optimizer == "sgd_momentum" else 0.0
    return torch.optim.SGD(held, lr=rate, momentum=momentum)


def _peak_memory_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
