"""Float32 masters and loss scaling, against plain torch in float32 and torch's GradScaler."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from executor.training.loss_scale import LossScale, LossScalePolicy
from executor.training.master_weights import MasterWeights
from executor.training.optimizer import export_state, import_state
from planner.errors import PipeplanError


def adamw(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters.values(), lr=0.01)


def low(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype)),
        "norm": nn.Parameter(torch.randn(3, generator=generator)),
    }


def gradient(step: int, parameter: nn.Parameter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_masters_train_as_float32_weights_do(dtype: torch.dtype, scale: float) -> None:
    parameters = low(dtype)
    alone = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
    optimizer = adamw(alone)
    weights = MasterWeights(parameters, adamw)
    for step in range(5):
        for name, parameter in parameters.items():
            parameter.grad = gradient(step, parameter) * scale
            alone[name].grad = gradient(step, parameter).float()
        weights.unscale(scale)
        weights.step()
        optimizer.step()
        assert all(parameter.grad is None for parameter in parameters.values())
    for name, parameter in parameters.items():
        assert weights.masters[name].equal(alone[name])
        assert parameter.equal(alone[name].to(parameter.dtype))
    assert weights.masters["norm"] is parameters["norm"]
    assert list(weights.state()) == ["w"]


def test_steps_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    parameters = {"w": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))}
    weights = MasterWeights(parameters, lambda p: torch.optim.SGD(p.values(), lr=2**-12))
    for _ in range(2**6):
        parameters["w"].grad = torch.ones(1, dtype=torch.bfloat16)
        weights.unscale()
        weights.step()
    assert parameters["w"].item() == 1 - 2**-6


def test_an_overflow_is_seen_and_its_step_can_be_skipped() -> None:
    parameters = low(torch.float16)
    weights = MasterWeights(parameters, adamw)
    parameters["w"].grad = torch.full((4, 3), 60000.0, dtype=torch.float16)
    weights.unscale()
    assert weights.masters["w"].grad.isfinite().all()
    parameters["w"].grad = torch.full((4, 3), 60000.0, dtype=torch.float16) * 2
    before = weights.masters["w"].clone()
    weights.unscale(65536.0)
    assert not weights.masters["w"].grad.isfinite().any()
    weights.skip()
    weights.step()
    assert weights.masters["w"].equal(before)
    assert not weights.optimizer.state


def test_masters_resume_bit_by_bit() -> None:
    runs = []
    for stop in (0, 3):
        parameters = low(torch.bfloat16)
        weights = MasterWeights(parameters, adamw)
        for step in range(6):
            if step == stop:
                state = {name: x.clone() for name, x in weights.state().items()}
                moments = export_state(weights.optimizer, weights.masters)
                norm = parameters["norm"].detach().clone()
                parameters = low(torch.bfloat16)
                parameters["norm"].data.copy_(norm)
                weights = MasterWeights(parameters, adamw)
                for name, master in weights.state().items():
                    master.copy_(state[name])
                weights.copy_back()
                import_state(weights.optimizer, weights.masters, moments)
                assert parameters["w"].equal(state["w"].bfloat16())
            for parameter in parameters.values():
                parameter.grad = gradient(step, parameter)
            weights.unscale()
            weights.step()
        runs.append({name: master.detach() for name, master in weights.masters.items()})
    assert all(runs[0][name].equal(runs[1][name]) for name in runs[0])


def test_float64_weights_are_their_own_masters() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(1, dtype=torch.float64))}
    assert MasterWeights(parameters, adamw).masters["w"] is parameters["w"]


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 59))
def test_the_scale_moves_as_torchs_grad_scaler_does(
    overflows: list[bool], interval: int, saved_at: int
) -> None:
    """One resumes from its facts on the way; scales stay in the range where torch has no limits."""
    policy = LossScalePolicy(
        initial=2.0**10, growth_interval=interval, least=2.0**-120, most=2.0**120
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(torch.ones(1))
    state = LossScale.start(policy)
    for step, overflowed in enumerate(overflows):
        if step == saved_at:
            state = LossScale.from_facts(state.facts())
        assert state.scale == scaler.get_scale()
        parameter.grad = torch.tensor([float("inf") if overflowed else 1.0])
        scaler.step(optimizer)
        scaler.update()
        state = state.after(overflowed=overflowed)
    assert state.scale == scaler.get_scale()


def test_overflows_at_the_least_scale_are_an_error_and_growth_ends() -> None:
    state = LossScale.start(LossScalePolicy(initial=2.0, growth_interval=1, most=4.0))
    assert [state.scale, state.after(overflowed=False).scale] == [2.0, 4.0]
    assert state.after(overflowed=False).after(overflowed=False).scale == 4.0
    state = state.after(overflowed=True)
    assert state.scale == 1.0
    with pytest.raises(PipeplanError, match="training diverges; lower the learning rate"):
        state.after(overflowed=True)


@pytest.mark.parametrize("facts", [{}, {"scale": 1}, {"policy": {"initial": "x"}}, {"policy": 3}])
def test_facts_that_are_no_state_are_refused(facts: dict) -> None:
    with pytest.raises(PipeplanError, match="not the state of a loss scale"):
        LossScale.from_facts(facts)
