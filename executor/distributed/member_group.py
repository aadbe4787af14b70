"""Collectives inside a tensor-parallel group, as operations of the graph that its members run.

Shoeybi et al. 2019, "Megatron-LM", section 3, and Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2: what the forward sums the backward hands
on, and the other way round. All members run one graph in one order, so that they come to each
collective together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from executor.distributed.expert_rows import ExpertRows, Members
from executor.distributed.failure import talking_to
from executor.distributed.process_group import all_gather_single, reduce_scatter_single
from planner.model.split_record import SplitRecord
from planner.tracing.sharding.local import join, share
from planner.tracing.torch_private import storage_key

Parts = tuple[int, ...]


@dataclass(frozen=True)
class MemberShare:
    """The part of a parameter that a member holds: an equal share of each part of a dimension.

    Attributes:
        dimension: that is split.
        parts: sizes of its parts.
        degree: number of members.
        index: of the member.
    """

    dimension: int
    parts: Parts
    degree: int
    index: int

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor."""
        return share(whole, self.dimension, self.parts, self.degree, self.index)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the whole tensor's shape, given the part's."""
        own = self.dimension
        return (*shape[:own], shape[own] * self.degree, *shape[own + 1 :])


def member_shares(split: SplitRecord | None, index: int) -> dict[str, MemberShare]:
    """Return the shares of a member by the names of the parameters; none without groups."""
    if split is None or split.degree is None:
        return {}
    return {
        name: MemberShare(row.dimension, row.parts, split.degree, index)
        for name, row in split.parameters.items()
    }


class Marks(Protocol):
    """Notes when something began and ended, as :class:`executor.runtime.runtime.Recorder` does."""

    def mark(self) -> Any:
        """This moment."""

    def note(self, kind: str, what: Any, start: Any) -> None:
        """Something of a kind that ends now."""


class ProcessGroupMembers(Members):
    """Members that are the ranks of a process group.

    Args:
        process_group: its ranks in the order of the members.
        marks: notes the times of their collectives.
    """

    shapes_only = False

    def __init__(self, process_group: Any, marks: Marks) -> None:
        self._marks = marks
        super().__init__(dist.get_world_size(process_group))
        self.index = dist.get_rank(process_group)
        self._group = process_group
        ranks = dist.get_process_group_ranks(process_group)
        self._whom = f"ranks {', '.join(map(str, ranks))}, members of one tensor-parallel group"

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Note the time of a collective, and tell who could not be talked to."""
        start = self._marks.mark()
        with talking_to(self._whom):
            yield
        self._marks.note("collectives", None, start)

    def sum(self, value: Tensor) -> None:
        """Add a contiguous tensor up over all members, in place."""
        with self._together():
            dist.all_reduce(value, group=self._group)

    def highest(self, value: Tensor) -> None:
        """Take the highest of all members, element by element, in place."""
        with self._together():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)

    def gather(self, value: Tensor) -> Tensor:
        """Return the contiguous tensors of all members, in a new first dimension."""
        found = value.new_empty((self.degree, *value.shape))
        with self._together():
            all_gather_single(found.view(-1), value.view(-1), group=self._group)
        return found

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sum contiguous tensors over all members, and return the row of this one."""
        found = values.new_empty(values.shape[1:])
        with self._together():
            reduce_scatter_single(found.view(-1), values.view(-1), group=self._group)
        return found

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to each member, those of the first in front, and return those from each."""
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        with self._together():
            dist.all_to_all_single(found, rows, [*received], [*sent], group=self._group)
        return found


def sum_partial_gradients(members: Members, parameters: Sequence[Tensor]) -> None:
    """Sum gradients of parameters that all members have whole, each with a part of the gradient.

    Args:
        members: of the group.
        parameters: in one order on all members; those without a gradient are left out.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_type.values():
        total = torch.cat([gradient.reshape(-1) for gradient in gradients])
        members.sum(total)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, torch.split(total, sizes), strict=True):
            gradient.copy_(part.view_as(gradient))


class TensorParallelGroup(ExpertRows):
    """The collectives of a localised graph; see :mod:`planner.tracing.sharding.local`.

    Args:
        members: of the group.
    """

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._gathered: dict[int, _Gathered] = {}  # By its storage.
        self._again: tuple[_Gathered, Tensor] | None = None

    @contextmanager
    def keeping_shares(self) -> Iterator[None]:
        """Let operations inside keep, of what is gathered, this member's share for the backward.

        The backward gathers it again, once for operations that follow each other there.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
            yield

    def end_backward(self) -> None:
        """Let go of what the backward has gathered."""
        self._again = None

    def _packed(self, value: Tensor) -> Tensor | _KeptShare:
        found = self._gathered.get(storage_key(value))
        if found is None or found.whole() is None:
            return value
        return _KeptShare(found, value.shape, value.stride(), int(value.storage_offset()))

    def _unpacked(self, kept: Tensor | _KeptShare) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        row = kept.of
        if self._again is None or self._again[0] is not row:
            self._again = row, self.joined(row.share, row.dimension, row.parts)
        return self._again[1].as_strided(kept.shape, kept.stride, kept.offset)

    def all_reduce(self, value: Tensor, is_fresh: bool) -> Tensor:
        """Sum partial sums of all members; the gradient of each is that of the sum.

        Args:
            value: a partial sum.
            is_fresh: whether nothing else reads it, so that the sum may take its place.
        """
        # Autograd copies the gradient of a view that is written to.
        in_place = is_fresh and value.is_contiguous() and not value._is_view()
        return _AllReduce.apply(self, value, in_place)  # type: ignore[no-any-return,no-untyped-call]

    def copy(self, value: Tensor, is_fresh: bool) -> Tensor:
        """Return a whole value, whose partial gradients are summed.

        Args:
            value: the same on all members.
            is_fresh: whether nothing else has its gradients, so that the sum may take their place.
        """
        return _Copy.apply(self, value, is_fresh)  # type: ignore[no-any-return,no-untyped-call]

    def reduce_scatter(self, value: Tensor, dimension: int, parts: Parts) -> Tensor:
        """Sum partial sums and return this member's share; the backward gathers."""
        return _apply(self.shares_of_sum, self.joined, value, dimension, parts)

    def gather(self, value: Tensor, dimension: int, parts: Parts, is_partial: bool) -> Tensor:
        """Join the shares; the backward sums gradients that are partial, and takes a share."""
        backward = self.shares_of_sum if is_partial else self.take
        whole = _apply(self.joined, backward, value, dimension, parts)
        alive = {key: row for key, row in self._gathered.items() if row.whole() is not None}
        row = _Gathered(weakref.ref(whole), value.detach(), dimension, parts)
        self._gathered = {**alive, storage_key(whole): row}
        return whole

    def scatter(self, value: Tensor, dimension: int, parts: Parts) -> Tensor:
        """Return this member's share of a whole value; the backward gathers."""
        return _apply(self.take, self.joined, value, dimension, parts)

    def take(self, value: Tensor, dimension: int, parts: Parts) -> Tensor:
        """Return this member's share of a value without gradient: its share of each part."""
        return share(value, dimension, parts, self.members.degree, self.members.index)

    def embedding(self, weight: Tensor, index: Tensor, padding: int) -> Tensor:
        """Look up the rows that this member has, zero for others: a partial sum."""
        count = weight.shape[0]
        first = count * self.members.index
        own = index - first
        is_elsewhere = (own < 0) | (own >= count)
        # The padding row is looked up, but takes no gradient.
        skipped = padding - first if first <= padding < first + count else None
        rows = functional.embedding(own.masked_fill(is_elsewhere, 0), weight, skipped)
        return rows.masked_fill(is_elsewhere[..., None], 0)

    def cross_entropy(self, logits: Tensor, target: Tensor, reduction: int, ignored: int) -> Tensor:
        """Return the loss of logits, of which each member has a share of the classes.

        Args:
            logits: [rows, classes of this member].
            target: class of each row, of all members' classes.
            reduction: 0 none, 1 mean, 2 sum; as torch numbers them.
            ignored: target of rows that do not count.
        """
        kept = logits.dtype
        if kept in (torch.float16, torch.bfloat16):
            logits = logits.float()
            if torch.is_autocast_enabled(logits.device.type):
                kept = logits.dtype  # Autocast computes this loss in float32.
        losses = _ClassLosses.apply(self.members, logits, target)  # type: ignore[no-untyped-call]
        counts = target != ignored
        losses = losses.masked_fill(counts.logical_not(), 0)
        if reduction:
            losses = losses.sum() / counts.sum() if reduction == 1 else losses.sum()
        return losses.to(kept)  # type: ignore[no-any-return]

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over all members, with the strides of the value."""
        total = value.detach().clone()
        # A clone is dense: its memory in order is contiguous, whatever its strides.
        self.members.sum(total.as_strided((total.numel(),), (1,)))
        return total

    def shares_of_sum(self, value: Tensor, dimension: int, parts: Parts) -> Tensor:
        """Return this member's share of the sum over all."""
        degree = self.members.degree
        rows = [share(value, dimension, parts, degree, index) for index in range(degree)]
        return self.members.reduce_scatter(torch.stack(rows))

    def joined(self, value: Tensor, dimension: int, parts: Parts) -> Tensor:
        """Return the whole value of all members' shares."""
        return join(self.members.gather(value.contiguous()).unbind(), dimension, parts)


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A value that was gathered, while it is there, and this member's share of it."""

    whole: weakref.ref[Tensor]
    share: Tensor
    dimension: int
    parts: Parts


@dataclass(frozen=True)
class _KeptShare:
    """What an operation keeps of a gathered value: its share, and which view of all it needs."""

    of: _Gathered
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorParallelGroup, value: Tensor, in_place: bool) -> Tensor:
        if not in_place:
            return group.total(value)
        group.members.sum(value)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorParallelGroup, value: Tensor, is_fresh: bool) -> Tensor:
        ctx.group, ctx.is_fresh = group, is_fresh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.is_fresh or not gradient.is_contiguous():
            return None, ctx.group.total(gradient), None
        ctx.group.members.sum(gradient)
        return None, gradient, None


Moved = Callable[[Tensor, int, Parts], Tensor]


def _apply(
    forward: Moved,
    backward: Moved,
    value: Tensor,
    dimension: int,
    parts: Parts,
) -> Tensor:
    """Return ``forward`` of a value, whose gradient is ``backward`` of the result's."""
    return _Moved.apply(forward, backward, value, dimension, parts)  # type: ignore[no-any-return,no-untyped-call]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Moved, backward: Moved, value: Tensor, dimension: int, parts: Parts
    ) -> Tensor:
        ctx.backward_of, ctx.place = backward, (dimension, parts)
        return forward(value, dimension, parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, ctx.backward_of(gradient, *ctx.place), None, None


class _ClassLosses(torch.autograd.Function):
    """Losses of rows by logits whose classes are shared: three sums of a number a row."""

    @staticmethod
    def forward(ctx: Any, members: Members, logits: Tensor, target: Tensor) -> Tensor:
        count = logits.shape[1]
        highest = logits.amax(1)
        members.highest(highest)
        exponentials = (logits - highest[:, None]).exp_()
        own = target - count * members.index
        is_elsewhere = (own < 0) | (own >= count)
        own = own.masked_fill(is_elsewhere, 0)
        right = logits.gather(1, own[:, None])[:, 0] - highest
        sums = torch.stack([exponentials.sum(1), right.masked_fill(is_elsewhere, 0)])
        members.sum(sums)
        exponentials /= sums[0][:, None]
        ctx.save_for_backward(exponentials, own, is_elsewhere)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, own, is_elsewhere = ctx.saved_tensors
        found = probabilities * gradient[:, None]
        right = gradient.masked_fill(is_elsewhere, 0)[:, None]
        found.scatter_add_(1, own[:, None], -right)
        return None, found, None
