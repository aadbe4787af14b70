"""Rows of experts on the members of a group; see :mod:`planner.tracing.sharding.local`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Members:
    """The members of a group, as one of them talks to all.

    These are all like this one and share no process group: collectives give tensors of the right
    shapes without values, to find the shapes of what a graph makes.

    Args:
        degree: number of members.

    Attributes:
        index: of this member.
        shapes_only: whether tensors have shapes alone, so that no routing can be read from them.
    """

    index = 0
    shapes_only = True

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def gather(self, value: Tensor) -> Tensor:
        """Return the contiguous tensors of all members, in a new first dimension."""
        return value.new_empty((self.degree, *value.shape))

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to each member, those of the first in front, and return those from each."""
        return rows.new_empty((sum(received), *rows.shape[1:]))

    def sum(self, value: Tensor) -> None:
        """Add a contiguous tensor up over all members, in place."""

    def highest(self, value: Tensor) -> None:
        """Take the highest of all members, element by element, in place."""

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sum contiguous tensors over all members, and return the row of this one."""
        return values.new_empty(values.shape[1:])


class ExpertRows:
    """The methods of a group that send tokens to its experts, of which each member has some.

    Args:
        members: of the group.
    """

    def __init__(self, members: Members) -> None:
        self.members = members

    # --- every member has all tokens ---

    def own_rows(self, hidden: Tensor, chosen: Tensor, experts: int) -> Tensor:
        """Copy the tokens that chose this member's experts to rows, sorted by expert."""
        if self.members.shapes_only:
            return self._share_of_rows(hidden, chosen)
        return hidden.flatten(0, -2)[self._own(chosen, experts) // chosen.shape[-1]]

    def own_offsets(self, chosen: Tensor, experts: int) -> Tensor:
        """Return where the rows of each of this member's experts end."""
        if self.members.shapes_only:
            return chosen.new_empty((experts // self.members.degree,))
        return _counts(chosen, experts)[self._slice(experts)].cumsum(0)

    def own_sums(self, rows: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
        """Sum the rows of this member's experts by token, weighted; zero where there are none."""
        shape = (*chosen.shape[:-1], rows.shape[-1])
        if self.members.shapes_only:
            return rows.new_empty(shape)
        own = self._own(chosen, experts)
        weighted = rows * weights.flatten()[own][:, None]
        sums = weighted.new_zeros((chosen.numel() // chosen.shape[-1], rows.shape[-1]))
        return sums.index_add(0, own // chosen.shape[-1], weighted).view(shape)

    def _own(self, chosen: Tensor, experts: int) -> Tensor:
        """Return which (token, choice) each of this member's rows holds."""
        flat, own = chosen.flatten(), self._slice(experts)
        mine: Tensor = ((flat >= own.start) & (flat < own.stop)).nonzero()[:, 0]
        return mine[flat[mine].argsort(stable=True)]

    # --- every member has some tokens ---

    def expert_counts(self, chosen: Tensor, experts: int) -> Tensor:
        """Gather how many tokens of each member chose each expert, int64 [members, experts]."""
        if self.members.shapes_only:
            return chosen.new_empty((self.members.degree, experts))
        return self.members.gather(_counts(chosen, experts))

    def send_rows(self, hidden: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Send this member's tokens to their experts; return those received, sorted by expert."""
        if self.members.shapes_only:
            # Of experts that are chosen equally often, as many as are sent.
            return hidden.new_empty((chosen.numel(), hidden.shape[-1]))
        rows = hidden.flatten(0, -2)[_order(chosen) // chosen.shape[-1]]
        sent, received = self._sizes(counts)
        return self._exchange(rows, sent, received)[self._by_expert(counts)]

    def received_offsets(self, counts: Tensor) -> Tensor:
        """Return where the rows received for each of this member's experts end."""
        return counts[:, self._slice(counts.shape[1])].sum(0).cumsum(0)

    def return_rows(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Send rows back to where they came from; return the weighted sums of own tokens."""
        if self.members.shapes_only:
            return rows.new_empty((*chosen.shape[:-1], rows.shape[-1]))
        sent, received = self._sizes(counts)
        as_received = rows[_inverse(self._by_expert(counts))]
        back = self._exchange(as_received, received, sent)
        by_token = back[_inverse(_order(chosen))].view(*chosen.shape, rows.shape[-1])
        return (by_token * weights[..., None]).sum(-2)

    def _sizes(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """Return how many rows this member sends to each, and receives from each."""
        degree, index = self.members.degree, self.members.index
        rows = counts.view(degree, degree, -1).sum(2)  # [from, to]
        sent, received = torch.stack((rows[index], rows[:, index])).tolist()
        return sent, received

    def _by_expert(self, counts: Tensor) -> Tensor:
        """Return the order by expert of rows that are received by member, then by expert."""
        of_each = counts[:, self._slice(counts.shape[1])]
        experts = torch.arange(of_each.shape[1], device=counts.device).repeat(len(of_each))
        return experts.repeat_interleave(of_each.flatten()).argsort(stable=True)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return _Exchange.apply(self.members, rows, sent, received)  # type: ignore[no-any-return,no-untyped-call]

    def _slice(self, experts: int) -> slice:
        """Return the numbers of this member's experts."""
        each = experts // self.members.degree
        return slice(each * self.members.index, each * (self.members.index + 1))

    def _share_of_rows(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        return hidden.new_empty((chosen.numel() // self.members.degree, hidden.shape[-1]))


def _order(chosen: Tensor) -> Tensor:
    """Return which (token, choice) each row holds, sorted by expert, then by token."""
    return chosen.flatten().argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found


def _counts(chosen: Tensor, experts: int) -> Tensor:
    return torch.bincount(chosen.flatten(), minlength=experts)


class _Exchange(torch.autograd.Function):
    """Sends rows to members; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, members: Members, rows: Tensor, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.members, ctx.sizes = members, (received, sent)
        return members.exchange(rows.contiguous(), sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.members.exchange(gradient.contiguous(), *ctx.sizes), None, None
