"""An optimizer whose state was taken out and put into a fresh one goes on bit by bit."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from executor.checkpoint import Checkpoint, save_checkpoint
from executor.training.optimizer import export_state, import_state
from planner.errors import PipeplanError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


class Numbers(torch.optim.Optimizer):
    """Keeps Python numbers and None, as older optimizers do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["rate"] = state.get("rate", 0.3) / 3
                state["odd"] = state["count"] % 2 == 1
                state["nothing"] = None
                assert isinstance(state["count"], int)
                assert type(state["odd"]) is bool
                parameter -= state["rate"] * state["count"] * parameter.grad


OPTIMIZERS["numbers"] = Numbers


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a/b.weight": (4, 3), "scale": (), "b.weight": (5,), "unused": (2,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def train(held: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, parameter in held.items():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            # One parameter takes part late, one never.
            late = name == "unused" or (name == "b.weight" and step < 3)
            parameter.grad = None if late else gradient
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_training_goes_on_bit_by_bit(
    tmp_path: Path, name: str, dtype: torch.dtype, stop: int
) -> None:
    whole = parameters(dtype)
    train(whole, OPTIMIZERS[name](list(whole.values())), range(8))
    first = parameters(dtype)
    optimizer = OPTIMIZERS[name](list(first.values()))
    train(first, optimizer, range(stop))
    save_checkpoint(tmp_path, stop, export_state(optimizer, first), {})
    second = copy.deepcopy(first)
    # Other stages on this rank: another order of the parameters.
    resumed = OPTIMIZERS[name](list(reversed(second.values())))
    checkpoint = Checkpoint.open(tmp_path)
    import_state(resumed, second, checkpoint.read(checkpoint.names()))
    train(second, resumed, range(stop, 8))
    for key, parameter in whole.items():
        assert second[key].equal(parameter), key


def test_the_state_can_be_divided_among_ranks_by_name() -> None:
    held = parameters()
    optimizer = torch.optim.AdamW(held.values())
    train(held, optimizer, range(4))
    state = export_state(optimizer, held)
    assert "unused/step" not in state
    assert state["a/b.weight/exp_avg"].equal(optimizer.state[held["a/b.weight"]]["exp_avg"])
    part = {"b.weight": held["b.weight"]}
    other = torch.optim.AdamW(part.values())
    import_state(other, part, {k: v for k, v in state.items() if k.startswith("b.weight/")})
    assert other.state[held["b.weight"]]["step"].equal(torch.tensor(1.0))
    with pytest.raises(PipeplanError, match=r"of parameters that are not held here: a/b\.weight/"):
        import_state(other, part, state)


def test_what_was_imported_shares_no_memory_with_the_source() -> None:
    held = {"w": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.AdamW(held.values())
    train(held, optimizer, range(1))
    state = export_state(optimizer, held)
    import_state(optimizer, held, state)
    train(held, optimizer, range(1, 2))
    assert state["w/step"] == 1
    assert optimizer.state[held["w"]]["step"] == 2


def test_an_optimizer_with_other_state_is_refused() -> None:
    held = {"w": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.LBFGS(held.values())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = held["w"].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(PipeplanError, match=r"LBFGS keeps .* such as AdamW and SGD"):
        export_state(optimizer, held)


def test_parameters_of_another_optimizer_are_refused() -> None:
    held = parameters()
    with pytest.raises(PipeplanError, match="SGD does not train scale"):
        import_state(torch.optim.SGD([held["a/b.weight"]]), {"scale": held["scale"]}, {})
