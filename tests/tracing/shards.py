"""Runs a localised step on all ranks of a group in one process: a value is a list of shares.

Collectives are sums and concatenations of lists. Their backwards are written out, rank by rank, as
a runtime has them, so that a gradient that the split leaves partial is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from planner.tracing.export import ExportedStep
from planner.tracing.sharding.local import LocalStep, join, share
from planner.tracing.sharding.split import Split
from planner.tracing.sharing import attribute_of


class Shares(list[Any]):
    """The values of all ranks."""


class _Collective(torch.autograd.Function):
    """What becomes of the values of all ranks forwards, and of their gradients backwards."""

    @staticmethod
    def forward(ctx: Any, run: Any, back: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(value.clone() for value in run(values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *(gradient.clone() for gradient in ctx.back(gradients))


def _same(values: Sequence[Tensor]) -> Sequence[Tensor]:
    return values


def _totals(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(tuple(values)).sum(0)] * len(values)


def _own_shares(values: Sequence[Tensor], place: Any) -> list[Tensor]:
    return [share(value, *place, len(values), rank) for rank, value in enumerate(values)]


def _joins(values: Sequence[Tensor], place: Any) -> list[Tensor]:
    return [join(values, *place)] * len(values)


class ListGroup:
    """The collectives of a group whose ranks are entries of lists; counts its calls."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.experts = 0
        self.calls: list[str] = []

    def all_reduce(self, values: Shares, is_fresh: bool = False) -> Shares:
        return Shares(_Collective.apply(_totals, _same, *values))

    def copy(self, values: Shares, is_fresh: bool) -> Shares:
        return Shares(_Collective.apply(_same, _totals, *values))

    def reduce_scatter(self, values: Shares, *place: Any) -> Shares:
        return Shares(
            _Collective.apply(
                lambda x: _own_shares(_totals(x), place), lambda g: _joins(g, place), *values
            )
        )

    def gather(self, values: Shares, dimension: int, parts: Any, is_partial: bool) -> Shares:
        place, whole = (dimension, parts), _totals if is_partial else _same
        return Shares(
            _Collective.apply(
                lambda x: _joins(x, place), lambda g: _own_shares(whole(g), place), *values
            )
        )

    def scatter(self, values: Shares, *place: Any) -> Shares:
        return Shares(
            _Collective.apply(lambda x: _own_shares(x, place), lambda g: _joins(g, place), *values)
        )

    def take(self, values: Shares, *place: Any) -> Shares:
        return Shares(_own_shares(values, place))

    def own_rows(self, hidden: Shares, chosen: Shares, experts: int) -> Shares:
        return Shares(
            _rows([hidden[rank]], [chosen[rank]], own)
            for rank, own in enumerate(self._experts(experts))
        )

    def own_offsets(self, chosen: Shares, experts: int) -> Shares:
        return Shares(_ends([chosen[rank]], own) for rank, own in enumerate(self._experts(experts)))

    def own_sums(self, rows: Shares, chosen: Shares, weights: Shares, experts: int) -> Shares:
        return Shares(
            _sums([rows[rank]], [own], [chosen[rank]], 0, weights[rank])
            for rank, own in enumerate(self._experts(experts))
        )

    def expert_counts(self, chosen: Shares, experts: int) -> Shares:
        self.experts = experts
        return chosen  # Who has all shares needs no numbers.

    def send_rows(self, hidden: Shares, chosen: Shares, counts: Shares) -> Shares:
        return Shares(_rows(hidden, chosen, own) for own in self._experts(self.experts))

    def received_offsets(self, chosen: Shares) -> Shares:
        return Shares(_ends(chosen, own) for own in self._experts(self.experts))

    def return_rows(self, rows: Shares, chosen: Shares, weights: Shares, counts: Shares) -> Shares:
        everyone = self._experts(self.experts)
        return Shares(
            _sums(rows, everyone, chosen, rank, weights[rank]) for rank in range(self.degree)
        )

    def _experts(self, experts: int) -> list[range]:
        each = experts // self.degree
        return [range(rank * each, (rank + 1) * each) for rank in range(self.degree)]

    def embedding(self, weights: Shares, indices: Shares, padding: int) -> Shares:
        found = Shares()
        for rank, (weight, index) in enumerate(zip(weights, indices, strict=True)):
            own = index - rank * len(weight)
            is_own = (own >= 0) & (own < len(weight))
            rows = functional.embedding(own.where(is_own, 0), weight)
            is_counted = is_own & (index != padding)
            # The padding row is looked up, but takes no gradient.
            rows = torch.where(is_counted[..., None], rows, rows.detach())
            found.append(rows * is_own[..., None])
        return found

    def cross_entropy(
        self, logits: Shares, targets: Shares, reduction: int, ignored: int
    ) -> Shares:
        highest = torch.stack([part.detach().amax(1) for part in logits]).amax(0)
        shifted = [part - highest[:, None] for part in logits]
        sums = self.all_reduce(Shares(part.exp().sum(1) for part in shifted))
        own = [
            functional.one_hot((t - rank * p.shape[1]).clamp(-1, p.shape[1]) + 1, p.shape[1] + 2)
            for rank, (p, t) in enumerate(zip(shifted, targets, strict=True))
        ]
        picked = self.all_reduce(
            Shares((p * h[:, 1:-1]).sum(1) for p, h in zip(shifted, own, strict=True))
        )
        found = Shares()
        for total, right, target in zip(sums, picked, targets, strict=True):
            loss = (total.log() - right) * (target != ignored)
            scale = (target != ignored).sum() if reduction == 1 else 1
            found.append(loss.sum() / scale if reduction else loss)
        return found


def _choices(chosen: Sequence[Tensor], own: range) -> list[tuple[int, int, int]]:
    """Share, token and choice of each row of some experts, one expert after the other."""
    picks = [tokens.flatten(0, -2).tolist() for tokens in chosen]
    return [
        (place, token, row.index(expert))
        for expert in own
        for place, tokens in enumerate(picks)
        for token, row in enumerate(tokens)
        if expert in row
    ]


def _rows(hidden: Sequence[Tensor], chosen: Sequence[Tensor], own: range) -> Tensor:
    flat = [tokens.flatten(0, -2) for tokens in hidden]
    rows = [flat[place][token] for place, token, _ in _choices(chosen, own)]
    return torch.stack(rows) if rows else flat[0][:0]


def _ends(chosen: Sequence[Tensor], own: range) -> Tensor:
    counts = [len(_choices(chosen, range(expert, expert + 1))) for expert in own]
    return torch.tensor(counts).cumsum(0)


def _sums(
    rows: Sequence[Tensor],
    experts: Sequence[range],
    chosen: Sequence[Tensor],
    place: int,
    weights: Tensor,
) -> Tensor:
    """Weighted sums of the tokens of one share, whose rows are spread over lists of experts."""
    flat = weights.flatten(0, -2)
    total = rows[0].new_zeros(len(flat), rows[0].shape[1])
    for values, own in zip(rows, experts, strict=True):
        for row, (source, token, choice) in enumerate(_choices(chosen, own)):
            if source == place:
                part = values[row] * flat[token, choice]
                total = total.index_add(0, torch.tensor([token]), part[None])
    return total.view(*weights.shape[:-1], -1)


class _Ranks(fx.Interpreter):
    """Runs every operation once a rank, and collectives once for all."""

    def __init__(self, module: fx.GraphModule, degree: int, values: dict[str, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.degree, self.values = degree, values

    def fetch_attr(self, target: str) -> Any:
        found = self.values.get(target, super().fetch_attr(target))
        return found if isinstance(found, Shares) else Shares([found] * self.degree)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        shares = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Shares)]
        if not shares:
            return Shares([super().call_function(target, args, kwargs)] * self.degree)
        found, state = Shares(), torch.get_rng_state()
        for rank in range(self.degree):
            torch.set_rng_state(state)  # Each rank has a generator of its own.
            found.append(super().call_function(target, *_of_rank((args, kwargs), rank)))
        return found

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        group, *rest = args
        group.calls.append(target)
        return getattr(group, target)(*rest, **kwargs)


def _is_shares(value: Any) -> bool:
    return isinstance(value, Shares)


def _leaves(values: Any) -> list[Any]:
    return tree_leaves(values, is_leaf=_is_shares)


def _of_rank(values: Any, rank: int) -> Any:
    return tree_map(lambda v: v[rank] if _is_shares(v) else v, values, is_leaf=_is_shares)


def run_on_shards(
    exported: ExportedStep, split: Split, degree: int, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Run a step and its backward on a group.

    Returns:
        The loss; the gradients, shares joined, by parameter; and the names of the collectives.

    Raises:
        AssertionError: if ranks disagree about a loss or a gradient that all have.
    """
    module = fx.GraphModule(exported.module, LocalStep(exported, split).graph)
    leaves: dict[str, Shares] = {}
    values: dict[str, Shares] = {}
    for target, name in exported.names.items():
        whole = attribute_of(exported.module, target)
        if not isinstance(whole, nn.Parameter):
            continue
        if name not in leaves:
            leaves[name] = Shares(
                _part(whole, split, name, degree, rank).clone().requires_grad_(whole.requires_grad)
                for rank in range(degree)
            )
        values[target] = leaves[name]
    group = ListGroup(degree)
    inputs = [Shares([value.clone() for _ in range(degree)]) for value in batch.values()]
    (losses,) = _Ranks(module, degree, values).run(group, *inputs)
    losses = losses if isinstance(losses, Shares) else Shares(losses)
    torch.autograd.backward(list(losses))
    gradients = {
        name: _joined(parts, split, name)
        for name, parts in leaves.items()
        if parts[0].grad is not None
    }
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return losses[0].detach(), gradients, group.calls


def _part(whole: Tensor, split: Split, name: str, degree: int, rank: int) -> Tensor:
    whole = whole.detach()
    if name not in split.parameters:
        return whole
    own = split.parameters[name]
    return share(whole, own.dimension, own.parts, degree, rank)


def _joined(shares: Shares, split: Split, name: str) -> Tensor:
    gradients = [part.grad for part in shares]
    if name not in split.parameters:
        if name in split.summed:
            return torch.stack(gradients).sum(0)
        for gradient in gradients:
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-12)
        return gradients[0]
    return join(gradients, split.parameters[name].dimension, split.parameters[name].parts)
