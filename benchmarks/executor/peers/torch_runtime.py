"""The runtime of torch.distributed.pipelining, with static shapes and whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from benchmarks.executor.peers.cases import FACTORIES, Case
from benchmarks.executor.peers.models import PARTS
from executor.split.stage_module import StageModule
from planner.plan.operations import Operation, parse_operation
from planner.tracing.factory import import_factory

MULTIPLE = {
    "interleaved 1f1b": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class TorchRuntime:
    """One rank under a schedule of torch's.

    Args:
        case: what is run.
        rank: of this process.
        modules: this rank's stages by index.
        batch: the whole iteration's ``ids`` and ``target``.
        makes_loss: whether the last stage returns the loss itself, of labels it is given.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        modules: Mapping[int, nn.Module],
        batch: Mapping[str, Tensor],
        *,
        makes_loss: bool,
    ) -> None:
        self.modules = modules
        self.batch = batch
        self.makes_loss = makes_loss
        self.is_first = case.stage_ranks[0] == rank
        self.is_last = case.stage_ranks[-1] == rank
        stages = [_stage(case, index, module, makes_loss) for index, module in modules.items()]
        loss = (lambda found, _: found) if makes_loss else _cross_entropy
        if case.schedule == "1f1b":
            self.schedule = Schedule1F1B(stages[0], case.microbatches, loss)
        else:
            self.schedule = MULTIPLE[case.schedule](stages, case.microbatches, loss)

    def step(self) -> float:
        """All microbatches' forwards and backwards; this rank's share of the mean loss."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        arguments = (self.batch["ids"],) if self.is_first else ()
        labels = {"labels": self.batch["target"]} if self.makes_loss and self.is_last else {}
        losses: list[Tensor] = []
        target = self.batch["target"] if self.is_last else None
        kept = losses if self.is_last else None
        self.schedule.step(*arguments, target=target, losses=kept, return_outputs=False, **labels)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the model's own parameter names."""
        named = chain.from_iterable(m.named_parameters() for m in self.modules.values())
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


class CutStage(nn.Module):
    """A stage of the executor as a module for torch's runtime."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        (self.piece,) = (piece.graph for piece in stage.pieces)
        self.is_last = stage.is_last

    def forward(self, received: Tensor, labels: Tensor | None = None) -> Tensor:
        """The next stage's input, or the loss of the labels."""
        (made,) = self.piece(received, labels) if self.is_last else self.piece(received)
        return made


def hand_split(case: Case, rank: int, seed: int) -> dict[int, nn.Module]:
    """Return this rank's stages as modules of whole blocks."""
    torch.manual_seed(seed)
    model = import_factory(FACTORIES[case.model])(**case.arguments).train()
    last = len(case.stage_ranks) - 1
    return {
        index: PARTS[case.model](model, blocks, is_first=index == 0, is_last=index == last)
        for index, blocks in enumerate(case.block_ranges())
        if case.stage_ranks[index] == rank
    }


def order_of(case: Case, runtime: TorchRuntime) -> list[list[Operation]]:
    """Each rank's operations as torch's schedule has them."""
    if case.schedule == "1f1b":
        return [_one_forward_one_backward(case, rank) for rank in range(case.ranks)]
    rows = runtime.schedule.pipeline_order
    return [
        [_operation(str(action)) for action in rows[rank] if action is not None]
        for rank in range(case.ranks)
    ]


def _operation(word: str) -> Operation:
    found = parse_operation(word)
    assert found is not None, f"torch's order has {word}, which is no operation of ours"
    return found


def _one_forward_one_backward(case: Case, rank: int) -> list[Operation]:
    """Return the order that ``Schedule1F1B._step_microbatches`` runs, which it keeps in no list."""
    warm_up = min(case.microbatches, case.ranks - rank)
    forwards = [Operation(rank, "F", m) for m in range(case.microbatches)]
    backwards = [Operation(rank, "B", m) for m in range(case.microbatches)]
    order = forwards[:warm_up]
    for microbatch, backward in enumerate(backwards):
        order += [backward, *forwards[warm_up + microbatch :][:1]]
    return order


def _stage(case: Case, index: int, module: nn.Module, makes_loss: bool) -> PipelineStage:
    count = len(case.stage_ranks)
    return PipelineStage(
        module,
        index,
        count,
        torch.device("cpu"),
        input_args=_boundary(case, index, makes_loss),
        output_args=_boundary(case, index + 1, makes_loss),
    )


def _boundary(case: Case, index: int, makes_loss: bool) -> tuple[Tensor]:
    """Return a stage's input as a meta tensor, which takes no memory."""
    sizes: Sequence[int] = (case.samples, case.arguments["sequence_length"])
    if index == 0:
        return (torch.empty(sizes, dtype=torch.int64, device="meta"),)
    if index < len(case.stage_ranks):
        width = case.arguments["width"]
        return (torch.empty((*sizes, width), device="meta", requires_grad=True),)
    shape = () if makes_loss else (*sizes, case.arguments.get("vocabulary", 256))
    return (torch.empty(shape, device="meta", requires_grad=True),)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())
