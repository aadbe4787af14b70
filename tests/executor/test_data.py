"""Batches are the same on every rank, and text is text."""

import pytest
import torch
from torch import Tensor, nn

from executor.training.batches import batches, is_always_the_same, standard_library_text
from models import ZOO
from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.factory import import_factory

JOB = Job(samples_per_microbatch=3)


@pytest.mark.parametrize("name", ["gpt_tiny", "t5_tiny", "unet_tiny"])
def test_equal_arguments_give_equal_batches_and_others_different_ones(name: str) -> None:
    model = import_factory(ZOO[name])()
    first = batches("random", model, JOB, seed=0)
    torch.manual_seed(5)
    again = batches("random", model, JOB, seed=0)
    other = batches("random", model, JOB, seed=1)
    state = torch.get_rng_state()
    for entry in first(1, 0):
        assert first(1, 0)[entry].equal(again(1, 0)[entry])
    (entry, *_) = first(1, 0)
    for different in (first(1, 1), first(2, 0), other(1, 0)):
        assert not different[entry].equal(first(1, 0)[entry])
    # Whoever trains may count on torch's own random numbers.
    assert torch.get_rng_state().equal(state)


def test_text_asks_for_the_next_byte_of_python_sources() -> None:
    batch = batches("text", import_factory(ZOO["gpt_tiny"])(), JOB, seed=0)(1, 0)
    assert batch["ids"].shape == batch["target"].shape == (3, 64)
    assert batch["ids"][:, 1:].equal(batch["target"][:, :-1])
    corpus = bytes(standard_library_text().tolist())
    for row in batch["ids"]:
        assert bytes(row.tolist()) in corpus
    assert b"import" in corpus


@pytest.mark.parametrize("seed", [-1, 20_240_131, 2**63 - 1])
@pytest.mark.parametrize("source", ["text", "random"])
def test_any_seed_will_do(source: str, seed: int) -> None:
    batch_of = batches(source, import_factory(ZOO["gpt_tiny"])(), JOB, seed)
    assert not batch_of(1, 0)["ids"].equal(batch_of(2, 0)["ids"])


def test_text_for_too_small_a_vocabulary_is_refused() -> None:
    class Reader(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.one_hot(tokens).float()

    tokens = {"shape": [16], "dtype": "int64", "below": 100}
    job = Job.parse({"inputs": {"tokens": tokens, "target": tokens}}, "job")
    with pytest.raises(PipeplanError, match=r"inputs\.tokens\.below: 100, .* --data random"):
        batches("text", Reader(), job, seed=0)


def test_one_microbatch_that_differs_is_enough() -> None:
    def batch_of(step: int, microbatch: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float("nan") if microbatch < 3 else 0.0)}

    assert is_always_the_same(batch_of, 1, 3)  # Bit by bit: nan is itself.
    assert not is_always_the_same(batch_of, 1, 4)
