"""The user's own data: an order that nothing but seed and position changes, and clear errors."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.training.feed import open_data
from executor.training.samples import DatasetBatches, SampleOrder
from planner.errors import PipeplanError


@given(st.integers(1, 600), st.integers(), st.integers(0, 5))
def test_every_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = SampleOrder(size, seed)
    found = [order.index(epoch * size + place) for place in range(size)]
    assert sorted(found) == list(range(size))


def test_orders_of_many_samples_have_no_pattern() -> None:
    """Successive places and equal places of two epochs are uncorrelated (10^8 samples)."""
    size, count = 10**8, 4000
    order = SampleOrder(size, 3)
    first = np.array([order.index(place) for place in range(count)], dtype=float)
    second = np.array([order.index(size + place) for place in range(count)], dtype=float)
    other = np.array([SampleOrder(size, 4).index(place) for place in range(count)], dtype=float)
    bound = 5 / count**0.5
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert abs(np.corrcoef(first, other)[0, 1]) < bound
    assert abs(first.mean() / size - 0.5) < bound
    tenths = np.bincount((first * 10 // size).astype(int), minlength=10)
    assert abs(tenths - count / 10).max() < 6 * (count / 10) ** 0.5


def test_the_order_is_the_one_of_version_1() -> None:
    """Recorded here: a checkpoint of today must go on with the same samples tomorrow."""
    assert [SampleOrder(1000, 0).index(place) for place in range(5)] == [382, 478, 553, 683, 359]


class Squares:
    """Sample i is the number i; it says what it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked.append(index)
        return {"x": torch.full((2,), float(index)), "target": torch.tensor(index)}


def example(samples: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(samples, 2, dtype=dtype), "target": torch.zeros(samples).long()}


def taken(batches: DatasetBatches, steps: range, microbatches: int) -> list[int]:
    return [
        int(index)
        for step in steps
        for microbatch in range(microbatches)
        for index in batches(step, microbatch)["target"]
    ]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6))
def test_batches_follow_the_order_over_the_ends_of_epochs(
    size: int, samples: int, microbatches: int, seed: int
) -> None:
    batches = DatasetBatches(Squares(size), example(samples), microbatches, seed)
    found = taken(batches, range(1, 8), microbatches)
    assert len(found) == batches.samples_seen_after(7) == 7 * microbatches * samples
    assert found == [SampleOrder(size, seed).index(n) for n in range(len(found))]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_another_plan_goes_on_with_the_same_samples(
    stop: int, samples: int, microbatches: int
) -> None:
    whole = taken(DatasetBatches(Squares(17), example(2), 3, 5), range(1, 20), 3)
    first = DatasetBatches(Squares(17), example(2), 3, 5)
    seen = first.samples_seen_after(stop)
    found = taken(first, range(1, stop + 1), 3)
    then = DatasetBatches(
        Squares(17), example(samples), microbatches, 5, samples_seen=seen, first_step=stop + 1
    )
    found += taken(then, range(stop + 1, stop + 4), microbatches)
    assert then.samples_seen_after(stop + 3) == len(found)
    assert found == whole[: len(found)]


def test_only_the_microbatch_asked_for_is_loaded() -> None:
    data = Squares(100)
    batch = DatasetBatches(data, example(3), 4, 0)(2, 1)
    assert data.asked == batch["target"].tolist()
    assert batch["x"].equal(torch.tensor(data.asked).float()[:, None].expand(3, 2))


class Draws(Squares):
    """Augments at random, with every generator people use."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([torch.rand(1).item() + random.random(), np.random.rand()]), index


def test_what_a_data_set_draws_depends_on_the_sample_alone() -> None:
    torch.manual_seed(1)
    batches = DatasetBatches(Draws(9), example(6), 2, 0)
    fine = DatasetBatches(Draws(9), example(1), 12, 0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = batches(1, 1)["x"]
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    torch.rand(3), random.random()
    assert torch.cat([fine(1, microbatch)["x"] for microbatch in range(6, 12)]).equal(first)
    assert len({float(x) for x in first[:, 0]}) == 6
    # Sample 0 of the second epoch is drawn anew.
    drawn = {float(row) for b in (1, 2, 3) for row in batches(b, 0)["x"][:, 1]}
    assert len(drawn) == 18


class Returns(Squares):
    def __init__(self, make: Callable[[int], object]) -> None:
        super().__init__(5)
        self.make = make

    def __getitem__(self, index: int) -> object:
        return self.make(index)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.zeros(2), i),
        lambda i: [np.zeros(2, dtype=np.float32), np.int64(i)],
        lambda i: {"target": torch.tensor(i), "x": torch.zeros(2, requires_grad=True)},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_may_be_tuples_arrays_and_numbers(make: Callable, dtype: torch.dtype) -> None:
    batch = DatasetBatches(Returns(make), example(4, dtype), 1, 0)(1, 0)
    assert (batch["x"].dtype, batch["x"].shape) == (dtype, (4, 2))
    assert (batch["target"].dtype, batch["target"].shape) == (torch.int64, (4,))
    assert not batch["x"].requires_grad


WRONG = {
    "shape": (
        lambda i: (torch.zeros(1, 2), i),
        "entry 'x' is float32 [1, 2]; expected float32 [2]",
    ),
    "dtype": (lambda i: (torch.zeros(2), 0.5), "entry 'target' is float32 []; expected int64 []"),
    "double": (lambda i: (np.zeros(2), i), "entry 'x' is float64 [2]; expected float32 [2]"),
    "kind": (lambda i: ("text", i), "entry 'x' is a str; expected a tensor, an array or a number"),
    "large": (lambda i: (torch.zeros(2), 2**70), "entry 'target' cannot be made a tensor"),
    "missing": (lambda i: {"x": 1}, "returned entries x; expected the entries x, target, by name"),
    "more": (lambda i: (1, 2, 3), "returned a tuple of 3; expected the entries x, target"),
    "tensor": (lambda i: torch.zeros(2), "returned a Tensor; expected the entries"),
}


@pytest.mark.parametrize("case", WRONG)
def test_samples_that_do_not_fit_are_told(case: str) -> None:
    make, message = WRONG[case]
    batches = DatasetBatches(Returns(make), example(1), 1, 0)
    with pytest.raises(PipeplanError) as caught:
        batches(1, 0)
    assert str(caught.value).startswith(f"data Returns[{batches.order.index(0)}]")
    assert message in str(caught.value)


def test_both_entries_are_told_at_once() -> None:
    batches = DatasetBatches(Returns(lambda i: ("a", "b")), example(1), 1, 0)
    with pytest.raises(PipeplanError) as caught:
        batches(1, 0)
    assert len(caught.value.problems) == 2


def test_an_example_without_samples_is_refused() -> None:
    with pytest.raises(PipeplanError, match="without the samples as their first dimension"):
        DatasetBatches(Squares(3), {**example(2), "mask": torch.zeros(4, 4)}, 1, 0)


SOURCE = """
import sys

class Data:
    def __init__(self, size=3):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise OSError("no file")  # line 11

def endless():
    return iter(())

def leaves():
    sys.exit(2)

def none():
    return []

def text():
    return {1, 2}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "data_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "data_for_a_test"


def test_a_data_set_that_fails_is_told_with_its_place(own: str) -> None:
    data = open_data(f"{own}:Data", {"size": 4})
    assert len(data) == 4
    with pytest.raises(
        PipeplanError, match=r"^data lib\[\d\] failed: OSError: no file \(.*py:12\)"
    ):
        DatasetBatches(data, example(1), 1, 0, name="lib")(1, 0)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        ("Data", {"length": 3}, r"with data_arguments \{'length': 3\} cannot be made: TypeError"),
        ("leaves", {}, r"cannot be made: SystemExit: 2 \(.*data_for_a_test.py:18\)"),
        ("none", {}, "a list of 0 samples"),
        ("text", {}, "is of type set; expected"),
        ("nothing", {}, "has no callable 'nothing'"),
    ],
)
def test_what_is_no_data_set_is_told(own: str, factory: str, arguments: dict, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        open_data(f"{own}:{factory}", arguments)


def test_a_list_of_samples_is_a_data_set() -> None:
    rows = [(torch.full((2,), float(i)), i) for i in range(6)]
    assert sorted(taken(DatasetBatches(rows, example(2), 3, 1), range(1, 2), 3)) == list(range(6))
