"""A rank builds the weights of its own stages alone, with the values of the whole model."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from executor_plans import TINY, scheduled, zoo_pipeline
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from executor.launch.model import build_model
from executor.launch.partial_model import build_partially
from executor.launch.prepare import needed_by, prepare
from executor.launch.run import PlanRank
from models import ZOO
from planner.tracing.factory import import_factory
from planner.tracing.torch_private import TorchDispatchMode, packet_of, storage_key

Make = Callable[[], nn.Module]


def whole(make: Make, seed: int) -> nn.Module:
    for draws in (torch.manual_seed, np.random.seed, random.seed):
        draws(seed)
    return make()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    own = dict(enumerate(getattr(model, "scales", [])))
    return dict(model.named_parameters()) | dict(model.named_buffers()) | own


def assert_as_whole(
    make: Make, is_needed: Callable[[str], bool], dtype: torch.dtype = torch.float32
) -> None:
    expected = whole(lambda: make().to(dtype), 3)
    found = build_partially(make, 3, is_needed, dtype)
    after = torch.get_rng_state()
    whole(make, 3)
    assert torch.equal(after, torch.get_rng_state())
    parameters = dict(expected.named_parameters())
    mine = tensors(found)
    for name, tensor in tensors(expected).items():
        assert (mine[name].shape, mine[name].dtype) == (tensor.shape, tensor.dtype)
        assert mine[name].stride() == tensor.stride()
        if name not in parameters or is_needed(name):
            assert torch.equal(mine[name], tensor), name
    assert [n for n, _ in found.named_parameters()] == list(parameters)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in TINY), ("gpt_tiny", torch.bfloat16)]
)
def test_needed_parameters_of_the_zoo_are_those_of_the_whole_model(
    name: str, dtype: torch.dtype
) -> None:
    factory = import_factory(ZOO[name])

    def make() -> nn.Module:
        return factory().train()

    names = [n for n, _ in make().named_parameters()]
    for needed in (names[::2], names[:2], names[-2:]):
        assert_as_whole(make, needed.__contains__, dtype)


class Copies(nn.Module):
    """Layers that are copies of the first, and one that was copied into."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([first, nn.Linear(8, 8), copy.deepcopy(first)])
        self.last = nn.Linear(8, 8)
        with torch.no_grad():
            self.last.weight.copy_(first.weight)


class ScaledByAnother(nn.Module):
    """Decides by the values of a parameter how it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if float(self.first.weight.detach().sum()) != 0:
            nn.init.normal_(self.second.weight)
        self.third = nn.Linear(8, 8)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.5)


class Kept(nn.Module):
    """Has a tensor that is no buffer, made of a parameter that may not be needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scales = [self.first.weight.detach().abs().max()]
        self.twice = nn.Parameter(self.second.weight.detach() * 2)


class OwnDraws(nn.Module):
    """Draws from everybody's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.from_numpy(np.random.rand(4, 3)))
        self.factor = random.random()
        self.other = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), self.factor))


@pytest.mark.parametrize("model", [Copies, Tied, Kept, nn.LSTM])
def test_parameters_that_are_made_of_others_have_their_values(
    model: Callable[..., nn.Module],
) -> None:
    make = model if model is not nn.LSTM else lambda: nn.LSTM(4, 4, num_layers=3)
    names = [name for name, _ in make().named_parameters(remove_duplicate=False)]
    for name in names:
        assert_as_whole(make, name.__eq__)


def test_where_all_depends_on_all_the_whole_model_is_built_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert_as_whole(ScaledByAnother, "second.weight".__eq__)
    assert "this rank takes the memory of all of them" in caplog.text


def test_generators_of_numpy_and_python_are_seeded_and_given_back() -> None:
    assert_as_whole(OwnDraws, "rows".__eq__)
    before = np.random.get_state()[1].tolist(), random.getstate()
    build_partially(OwnDraws, 4, "rows".__eq__)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before


@contextmanager
def most_bytes() -> Iterator[list[int]]:
    """The most that parameters hold at any operation inside, as one number in a list."""
    parameters: list[nn.Parameter] = []
    found = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            if packet_of(function) is not torch.ops.aten.empty_strided:  # Touches no memory.
                storages = {storage_key(p): p.untyped_storage().nbytes() for p in parameters}
                found[0] = max(found[0], sum(storages.values()))
            return function(*args, **(kwargs or {}))

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameters.append(parameter)

    hook = register_module_parameter_registration_hook(note)
    with Watch():
        yield found
    hook.remove()


def test_no_rank_ever_holds_more_than_its_own_parameters_and_one_other() -> None:
    plan = scheduled(zoo_pipeline("gpt_tiny", [2, 3, 4], ["d0", "d1", "d2", "d3"], 4))
    factory = import_factory(ZOO["gpt_tiny"])
    sizes = {n: p.numel() * p.element_size() for n, p in factory().named_parameters()}
    for rank in range(4):
        needed = needed_by(plan, rank)
        with most_bytes() as most:
            build_model(plan, factory, 0, needed)
        own = sum(bytes_ for name, bytes_ in sizes.items() if needed(name))
        assert own < sum(sizes.values())
        assert most[0] <= own + max(sizes.values())


def test_stages_are_of_the_weights_that_one_process_would_have() -> None:
    plan = scheduled(zoo_pipeline("bert_tiny", [2, 4], ["d0", "d1", "d2"], 4))
    factory = import_factory(ZOO["bert_tiny"])
    expected = dict(whole(factory, 5).named_parameters())
    found = [prepare(plan, seed=5, place=PlanRank(rank, 3)).parameters for rank in range(3)]
    assert {name for held in found for name in held} == set(expected)
    for held in found:
        for name, parameter in held.items():
            assert torch.equal(parameter, expected[name]), name
