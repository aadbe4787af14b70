"""Operations that write into their arguments: cut so that nothing changes, or refused."""

from collections.abc import Callable

import pytest
import torch
from in_turn import Rows, assert_same, cut_everywhere, run_stages, run_whole
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import PipeplanError


class Writing(nn.Module):
    """A sigmoid keeps its result for the backward; ``write`` then writes into it."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
        self.second = Second(write)
        self.third = nn.Bilinear(4, 4, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features) * 1.0
        return self.third(self.second(hidden), hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"features": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


class Second(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.write(hidden))


def without_gradient(hidden: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        hidden.mul_(2.0)
    return hidden


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "into what it received": lambda x: x.mul_(2.0),
    "into a view of what it received": lambda x: x.view(-1).clamp_(0.1, 0.5).view(x.shape),
    "into what may be what it received": lambda x: torch.dropout(x, 0.0, True).mul_(2.0),
    "into a part of what it received": lambda x: x[:, 1:].zero_() + x[:, :3],
    "into what it received, inside a context": without_gradient,
    "into new memory": lambda x: (x + 1.0).mul_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_stage_may_write_into_what_it_received(write: str) -> None:
    def factory() -> nn.Module:
        model = Writing(WRITES[write])
        if "part" in write:
            model.second.linear = nn.Linear(3, 4)
        return model

    model, cut_model, layers = cut_everywhere(factory)
    batch = model.example_batch(5)
    expected = run_whole(model, batch, "mse")
    for place in range(1, len(layers)):
        stages = cut_model([layers[:place], layers[place:]])
        assert_same(run_stages(model, stages, batch), expected)
    stages = cut_model([[layer] for layer in layers])
    assert_same(run_stages(model, stages, batch), expected)
    copied = any(piece.written for stage in stages for piece in stage.pieces)
    assert copied == (write != "into new memory")


class TwoNamesForOneMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Second(lambda x: x.mul_(2.0))
        self.third = nn.Bilinear(4, 4, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        flat = hidden.view(-1)
        return self.third(self.second(hidden), flat.view(hidden.shape))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"features": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Second(lambda x: x.view(-1).mul_(2.0).view(x.shape))
        self.second = nn.Bilinear(4, 4, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(self.first(features), features)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"features": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


@pytest.mark.parametrize("factory", [TwoNamesForOneMemory, WritesIntoItsInput])
def test_a_write_that_another_stage_would_miss_is_refused(factory: type[nn.Module]) -> None:
    model, cut_model, layers = cut_everywhere(factory)
    with pytest.raises(PipeplanError, match="writes in place into"):
        cut_model([layers[:1], layers[1:]])
    # In one stage it is as good as any model.
    batch = model.example_batch(5)
    expected = run_whole(model, batch, "mse")
    assert_same(run_stages(model, cut_model([layers]), batch), expected)


class Scaled(nn.Module):
    """A linear layer with a scale that may be shared."""

    def __init__(self, scale: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4) if scale is None else scale)


class ReadsAndGrows(Scaled):
    def forward(self, rows: Tensor) -> Tensor:
        inverse = 1.0 / self.scale
        self.scale.mul_(2.0)
        return self.linear(rows) * inverse


class ReadsAndGrowsInside(Scaled):
    def forward(self, rows: Tensor) -> Tensor:
        inverse = 1.0 / self.scale
        with torch.no_grad():
            self.scale.mul_(2.0)
        return self.linear(rows) * inverse


class Reads(Scaled):
    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows) * (self.scale + 1.0)


class Grows(Scaled):
    def forward(self, rows: Tensor) -> Tensor:
        self.scale.add_(1.0)
        return self.linear(rows)


class GrowsInside(Scaled):
    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.add_(1.0)
        return self.linear(rows)


class Normalises(Scaled):
    def forward(self, rows: Tensor) -> Tensor:
        return functional.batch_norm(rows, self.scale, torch.ones(4), training=True)


@pytest.mark.parametrize("layer", [ReadsAndGrows, ReadsAndGrowsInside, nn.BatchNorm1d])
def test_a_buffer_that_one_stage_reads_and_writes_is_as_in_the_model(layer: Callable) -> None:
    def factory() -> nn.Module:
        module = layer(4) if layer is nn.BatchNorm1d else layer()
        return Rows(nn.Linear(4, 4), module, nn.Linear(4, 4))

    model, cut_model, layers = cut_everywhere(factory)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = model.example_batch(5)
    expected = [run_whole(model, batch, "mse") for _ in range(2)]
    for stages in ([layers[:1], layers[1:]], [layers[:2], layers[2:]], [[n] for n in layers]):
        model.load_state_dict(state)
        cut_stages = cut_model(stages)
        for step in range(2):
            assert_close(run_stages(model, cut_stages, batch), expected[step])


def assert_close(found: tuple[Tensor, dict], expected: tuple[Tensor, dict]) -> None:
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("first", "last"), [(Reads, Grows), (Reads, GrowsInside), (Reads, Normalises), (Grows, Grows)]
)
def test_a_buffer_that_another_stage_has_too_may_not_be_written(
    first: Callable, last: Callable
) -> None:
    def factory() -> nn.Module:
        scale = torch.ones(4)
        return Rows(first(scale), nn.Linear(4, 4), last(scale))

    _, cut_model, layers = cut_everywhere(factory)
    with pytest.raises(
        PipeplanError, match=r"writes in place into h\.0\.scale, of which stage [01] "
    ):
        cut_model([layers[:1], layers[1:]])
    assert cut_model([layers[:3], layers[3:]])


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.weight


class Doubles(Adds):
    def forward(self, rows: Tensor) -> Tensor:
        rows.view(-1).mul_(2.0)
        return rows + self.weight


class Fork(Rows):
    """Two layers use what the first made."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.h[0](rows)
        second = self.h[1](hidden)
        third = self.h[2](hidden)
        return self.h[3](second) + third


@pytest.mark.parametrize(
    ("second", "third", "message"),
    [
        (Adds, Doubles, "uses before it in the model, but in a later stage"),
        (Doubles, Adds, "uses after it in the model, but in an earlier stage"),
    ],
)
def test_stages_in_another_order_than_the_model_may_not_pass_a_write(
    second: Callable, third: Callable, message: str
) -> None:
    model, cut_model, layers = cut_everywhere(
        lambda: Fork(nn.Linear(4, 4), second(), third(), nn.Linear(4, 4))
    )
    first, *middle, last, loss = layers
    assert middle == ["h.1", "h.2"]
    with pytest.raises(PipeplanError, match=message):
        cut_model([[first, "h.2"], ["h.1", last, loss]])
    batch = model.example_batch(5)
    expected = run_whole(model, batch, "mse")
    assert_same(run_stages(model, cut_model([layers[:3], layers[3:]]), batch), expected)
