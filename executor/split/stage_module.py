"""A stage as modules of its own, by the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses from one stage, or one piece of it, to a later one.

    Attributes:
        name: of its node in the whole step.
        shape: its dimensions.
        dtype: its type.
        requires_grad: whether its gradient comes back.
        order: its dimensions from the outermost to the innermost in memory, in which it is sent,
            without a copy if it lies as expected. Dropout draws in the order of memory: a stage
            must receive a transposed tensor as one.
        shared: dimension of which each member of a tensor-parallel group has an equal share, in
            order; None: the tensor is whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...]
    shared: int | None = None

    def whole_shape(self, members: int) -> tuple[int, ...]:
        """Return the shape of the tensor that the shares of so many members make."""
        return tuple(
            size * (members if dimension == self.shared else 1)
            for dimension, size in enumerate(self.shape)
        )

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Dimensions in which it is sent, in the order of memory."""
        return tuple(self.shape[dimension] for dimension in self.order)

    @property
    def received_order(self) -> tuple[int, ...]:
        """The permutation that turns a sent tensor back, the inverse of ``order``."""
        return tuple(self.order.index(dimension) for dimension in range(len(self.order)))


def memory_order(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as a dense one like it has them in memory, outermost first."""
    alike = torch.empty_strided(value.shape, value.stride(), device="meta")
    strides = torch.empty_like(alike).stride()
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


@dataclass(frozen=True)
class Piece:
    """Layers of a stage that run as one: a recomputed one, or neighbours that offload, or do not.

    Of a stage whose replicas put each layer together, every layer is a piece.

    Attributes:
        recompute: whether it keeps only what it reads and runs again in the backward.
        offload: whether what it saves goes to the host between forward and backward.
        graph: called with ``reads`` and then the model inputs; returns ``makes`` as a tuple.
        reads: tensors made by earlier pieces or stages, in order.
        makes: tensors that later pieces or stages use, in order; the loss at the end of the model.
        model_inputs: names of the batch's entries it reads.
        written: names of read tensors that its operations may write into.
        written_buffers: buffers whose value depends on the order of microbatches, since operations
            write them other than as running statistics and counters; by FQN.
        is_random: whether it draws random numbers.
        last_reads: names of tensors that nothing in the stage uses after it.
        layer: its one layer, of a stage whose layers are all pieces; else None.
    """

    recompute: bool
    offload: bool
    graph: fx.GraphModule
    reads: tuple[BoundaryTensor, ...]
    makes: tuple[BoundaryTensor, ...]
    model_inputs: tuple[str, ...]
    written: frozenset[str]
    written_buffers: frozenset[str]
    is_random: bool
    last_reads: frozenset[str]
    layer: str | None = None


@dataclass(frozen=True)
class StageModule:
    """One stage.

    Attributes:
        index: of the stage.
        loss: what the last stage makes; None of others.
        pieces: run one after the other.
        receives, sends: what crosses its boundaries, in order.
        model_inputs: names of the batch's entries it reads.
        parameters, buffers: by the model's own names (FQNs).
        drawn_before: operations of earlier stages that draw random numbers, in order.
        draws, draws_after: whether itself or later stages draw some.
    """

    index: int
    loss: BoundaryTensor | None
    pieces: tuple[Piece, ...]
    receives: tuple[BoundaryTensor, ...]
    sends: tuple[BoundaryTensor, ...]
    model_inputs: tuple[str, ...]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    drawn_before: tuple[fx.Node, ...]
    draws: bool
    draws_after: bool

    @property
    def receives_random_state(self) -> bool:
        """Whether the random state comes with the tensors of the stage before."""
        return bool(self.drawn_before) and (self.draws or self.draws_after)

    @property
    def sends_random_state(self) -> bool:
        """Whether the random state goes on with the tensors for the next stage."""
        return (bool(self.drawn_before) or self.draws) and self.draws_after

    @property
    def is_last(self) -> bool:
        """Whether it makes the loss."""
        return self.loss is not None

    @property
    def outputs(self) -> tuple[BoundaryTensor, ...]:
        """The tensors that the forward returns."""
        return self.sends if self.loss is None else (self.loss,)

    @property
    def gradients_in(self) -> tuple[BoundaryTensor, ...]:
        """Sent tensors whose gradients come back."""
        return tuple(tensor for tensor in self.sends if tensor.requires_grad)
