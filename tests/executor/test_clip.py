"""Clipping over ranks is torch's clipping on one process."""

import math
from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import clip_gradients
from torch import Tensor, nn

from executor.training.master_weights import HeldParameter, gradient_norm
from planner.errors import PipeplanError


def parameters(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(3, 4), (), (7,), (2, 2)]]
    for parameter in found[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return found


def on_ranks(ranks: list[list[HeldParameter]], max_norm: float) -> list[float]:
    """Clip on every rank, each a thread, with one sum over all."""
    norms = [math.nan] * len(ranks)
    parts: list[Tensor] = [torch.zeros(1)] * len(ranks)
    barrier = Barrier(len(ranks), timeout=600)

    def run(rank: int) -> None:
        def sum_over_ranks(total: Tensor) -> None:
            parts[rank] = total.clone()
            barrier.wait()
            total.copy_(torch.stack(parts).sum(0))
            barrier.wait()

        norms[rank] = clip_gradients(ranks[rank], max_norm, sum_over_ranks)

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
        [
            HeldParameter(copies[rank][index], counted=mask & -mask == 1 << rank)
            for index, mask in enumerate(holders)
            if mask >> rank & 1
        ]
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
    clip_gradients([HeldParameter(p, counted=True) for p in held], 100.0, same)
    for parameter, gradient in zip(held, before, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or parameter.grad.equal(gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_are_not_taken_in_low_precision(dtype: torch.dtype) -> None:
    """100 x 3000^2 is beyond float16, and 1 beside it is lost in bfloat16."""
    parameter = nn.Parameter(torch.zeros(101, dtype=dtype))
    parameter.grad = torch.cat([torch.full((100,), 3000.0), torch.ones(1)]).to(dtype)
    held = [HeldParameter(parameter, counted=True)]
    expected = math.sqrt(sum(value**2 for value in parameter.grad.tolist()))
    assert gradient_norm(held, same) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 3_000_000])
def test_the_norm_of_many_elements_keeps_its_digits(count: int) -> None:
    parameter = nn.Parameter(torch.zeros(count))
    parameter.grad = torch.rand(count, generator=torch.Generator().manual_seed(count))
    found = gradient_norm([HeldParameter(parameter, counted=True)], same)
    assert found == pytest.approx(parameter.grad.double().norm().item(), rel=1e-7)
    parameter.grad[-1] = math.nan
    assert math.isnan(gradient_norm([HeldParameter(parameter, counted=True)], same))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_told_and_changes_nothing(value: float) -> None:
    held = parameters(0)
    held[2].grad[3] = value
    before = held[0].grad.clone()
    rows = [HeldParameter(parameter, counted=True) for parameter in held]
    assert not math.isfinite(gradient_norm(rows, same))
    with pytest.raises(PipeplanError, match="training diverges; lower the learning rate"):
        clip_gradients(rows, 1.0, same)
    assert held[0].grad.equal(before)


def test_a_rank_without_gradients_takes_part() -> None:
    assert gradient_norm([], lambda total: total.add_(9)) == 3
