"""Clipping over ranks is torch's clipping on one process."""

import math
from collections.abc import Callable, Sequence
from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from executor.training.master_weights import clip_factor, norm_of, require_finite, scale_gradients
from planner.errors import PipeplanError

SumOverRanks = Callable[[Tensor], object]


def parameters(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(3, 4), (), (7,), (2, 2)]]
    for parameter in found[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return found


def norm(held: Sequence[nn.Parameter], sum_over_ranks: SumOverRanks) -> Tensor:
    return norm_of([(p.grad, 1.0) for p in held if p.grad is not None], sum_over_ranks)


def clip(
    held: Sequence[nn.Parameter],
    max_norm: float,
    sum_over_ranks: SumOverRanks,
    counted: Sequence[nn.Parameter] | None = None,
) -> float:
    """Clip as the optimizer's step does, where this rank counts some or all; the norm before."""
    found = norm(held if counted is None else counted, sum_over_ranks)
    require_finite(1, 0.0, [float(found)])
    scale_gradients(held, clip_factor(found, max_norm))
    return float(found)


def on_ranks(ranks: list[tuple[list, list]], max_norm: float) -> list[float]:
    """Clip what every rank holds and counts, each a thread, with one sum over all."""
    norms = [math.nan] * len(ranks)
    parts: list[Tensor] = [torch.zeros(1)] * len(ranks)
    barrier = Barrier(len(ranks), timeout=600)

    def run(rank: int) -> None:
        def sum_over_ranks(total: Tensor) -> None:
            parts[rank] = total.clone()
            barrier.wait()
            total.copy_(torch.stack(parts).sum(0))
            barrier.wait()

        held, counted = ranks[rank]
        norms[rank] = clip(held, max_norm, sum_over_ranks, counted)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return norms


def same(total: Tensor) -> None:
    """The sum over one rank."""


@given(
    st.integers(0, 1000), st.floats(0.01, 30), st.lists(st.integers(1, 7), min_size=4, max_size=4)
)
def test_ranks_clip_as_one_process_does(seed: int, max_norm: float, holders: list[int]) -> None:
    """``holders`` are bit masks: which of three ranks hold each parameter; the lowest counts it."""
    alone = parameters(seed)
    expected = torch.nn.utils.clip_grad_norm_(alone, max_norm)
    copies = [parameters(seed) for _ in range(3)]
    ranks = [
        (
            [p for p, mask in zip(copies[rank], holders, strict=True) if mask >> rank & 1],
            [p for p, mask in zip(copies[rank], holders, strict=True) if mask & -mask == 1 << rank],
        )
        for rank in range(3)
    ]
    norms = on_ranks(ranks, max_norm)
    assert norms[0] == norms[1] == norms[2]
    assert norms[0] == pytest.approx(expected.item(), rel=1e-6)
    for rank in range(3):
        for index, mask in enumerate(holders):
            if mask >> rank & 1 and alone[index].grad is not None:
                torch.testing.assert_close(copies[rank][index].grad, alone[index].grad)


def test_gradients_below_the_norm_stay_bit_by_bit() -> None:
    held = parameters(0)
    before = [None if p.grad is None else p.grad.clone() for p in held]
    clip(held, 100.0, same)
    for parameter, gradient in zip(held, before, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or parameter.grad.equal(gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_are_not_taken_in_low_precision(dtype: torch.dtype) -> None:
    """100 x 3000^2 is beyond float16, and 1 beside it is lost in bfloat16."""
    parameter = nn.Parameter(torch.zeros(101, dtype=dtype))
    parameter.grad = torch.cat([torch.full((100,), 3000.0), torch.ones(1)]).to(dtype)
    expected = math.sqrt(sum(value**2 for value in parameter.grad.tolist()))
    assert norm([parameter], same) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 3_000_000])
def test_the_norm_of_many_elements_keeps_its_digits(count: int) -> None:
    parameter = nn.Parameter(torch.zeros(count))
    parameter.grad = torch.rand(count, generator=torch.Generator().manual_seed(count))
    found = norm([parameter], same)
    assert found == pytest.approx(parameter.grad.double().norm().item(), rel=1e-7)
    parameter.grad[-1] = math.nan
    assert math.isnan(norm([parameter], same))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_told_and_changes_nothing(value: float) -> None:
    held = parameters(0)
    held[2].grad[3] = value
    before = held[0].grad.clone()
    assert not math.isfinite(norm(held, same))
    with pytest.raises(PipeplanError, match="training diverges; lower the learning rate"):
        clip(held, 1.0, same)
    assert held[0].grad.equal(before)


def test_a_rank_without_gradients_takes_part() -> None:
    assert norm([], lambda total: total.add_(9)) == 3
