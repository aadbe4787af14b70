"""Emulation: operations take their predicted time and compute nothing, messages are real.

It runs schedules and networks of machines one does not have. An operation starts when its input is
there and the operation before it has ended, and ends its predicted duration later; the wait for
that moment absorbs how late the previous sleep woke, so that lateness does not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from executor.emulation.pace import Pace
from executor.launch.prepare import Prepared
from executor.launch.run import PlanRank
from executor.runtime.lowering import lower
from executor.runtime.worker import TensorSpec, Worker
from executor.stage.gradient_types import set_gradient_types
from executor.sync.shared_parameters import shared_parameters
from executor.training.optimisation import Optimisation, StepOutcome
from executor.training.optimizer import job_optimizer
from executor.training.trainer import StagePart, Trainer
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.model.graph_record import Boundary
from planner.plan.plan import Plan


class EmulatedWorker(Worker):
    """A stage that computes nothing and hands on tensors of the right shapes.

    Args:
        pipeline: the placed plan.
        part: the stage, which a pacer gives its time.
    """

    def __init__(self, pipeline: PlacedPipeline, part: StagePart) -> None:
        index = part.index
        assert part.pacer is not None
        self.is_last = index == len(pipeline.stages) - 1
        received = _crossing(pipeline, index)
        sent = [] if self.is_last else _crossing(pipeline, index + 1)
        self._incoming = [_spec(tensor) for tensor in received]
        self._returning = [_spec(t) for t in sent if t.requires_grad]
        self._needed = list(part.pacer.moments[index].needed)
        self._before_use = part.before_use
        self._outputs = tuple(map(_empty, map(_spec, sent)))
        self._gradients = tuple(_empty(_spec(t)) for t in received if t.requires_grad)

    def incoming(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the tensors that the previous stage sends for a microbatch."""
        return self._incoming

    def returning(self, microbatch: int) -> Sequence[TensorSpec]:
        """Return the gradients that the next stage sends back for a microbatch."""
        return self._returning

    def forward(self, microbatch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors for the next stage, or a loss of zero."""
        if self._before_use is not None:
            for name in self._needed:
                self._before_use([name])
        return (torch.zeros(()),) if self.is_last else self._outputs

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return gradients for the previous stage."""
        return self._gradients


def _crossing(pipeline: PlacedPipeline, index: int) -> list[Boundary]:
    """Return the tensors that a stage receives, as the layer graph says."""
    before = [layer for stage in pipeline.stages[:index] for layer in stage.spec.layers]
    return list(pipeline.problem.graph.crossing(before)) if index else []


def _spec(tensor: Boundary) -> TensorSpec:
    return TensorSpec(tensor.shape, getattr(torch, tensor.dtype))


def _empty(spec: TensorSpec) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype)


def emulating_trainer(
    plan: Plan,
    place: PlanRank,
    *,
    pace: Pace | None = None,
    **options: Any,
) -> Trainer:
    """Return this rank's part of a plan, emulated; the process group exists.

    Its parameters have no values, their gradients are zeros.

    Args:
        plan: verified.
        place: this process's rank.
        pace: how operations differ from their predicted time.
        **options: see :class:`~executor.training.trainer.Trainer`.

    Raises:
        PipeplanError: if stages offload their stashes: copies are not emulated.
    """
    if any(stage.offload for stage in plan.stages):
        raise PipeplanError(
            "stages.offload: copies of stashes to the host are not emulated; train the plan, or "
            "emulate one with offload = false"
        )
    program = tuple(lower(plan, in_one_order=False)[place.rank])
    parameters = _empty_parameters(plan, place.rank)
    return Trainer(
        Prepared(plan, place, torch.device("cpu"), nn.Module(), (), program, parameters),
        Optimisation({}, frozenset(), partial(job_optimizer, plan.job)),
        partial(EmulatedWorker, place_plan(plan)),
        pace=pace or Pace(),
        emulates=True,
        **{"optimise": lambda step: StepOutcome(None, None, skipped=False), **options},
    )


def _empty_parameters(plan: Plan, rank: int) -> dict[str, nn.Parameter]:
    """Return the parameters that a rank shares, which take up no memory."""
    bytes_of = {parameter.name: parameter.bytes for parameter in plan.model.graph.parameters}
    names = [name for row in shared_parameters(plan) if rank in row.ranks for name in row.names]
    one = torch.zeros(1, dtype=getattr(torch, plan.job.precision))
    found = {n: nn.Parameter(one.expand(-(-bytes_of[n] // one.itemsize))) for n in names}
    set_gradient_types(found.values(), plan.job)
    return found
