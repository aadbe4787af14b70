"""What batches may hold, read off an exported step; the models themselves are the oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.job import Job
from planner.tracing.export import export_step
from planner.tracing.factory import import_factory
from planner.tracing.lookups import lookups, text_problem_of_step
from planner.tracing.trace import trace_step

ROWS = {"samples": 2, "tokens": 6}
JOB = Job(samples_per_microbatch=2)


class Reader(nn.Module):
    """Looks its tokens up in a table of a given size, in one of many ways."""

    def __init__(self, way: str, tokens: int, classes: int) -> None:
        super().__init__()
        self.way = way
        self.tokens = tokens
        self.table = nn.Parameter(torch.ones(tokens, 4))
        self.head = nn.Linear(4, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self._rows(ids))

    def _rows(self, ids: Tensor) -> Tensor:
        if self.way == "embedding":
            return functional.embedding(ids, self.table)
        if self.way == "index":
            return self.table[ids]
        if self.way == "reshaped":
            return functional.embedding(ids.flatten(), self.table).unflatten(0, ids.shape)
        if self.way == "sliced":
            first, second = ids[:, :2].contiguous(), ids[:, 2:]
            return torch.cat([self.table[first], functional.embedding(second, self.table)], 1)
        if self.way == "split":
            return torch.cat([self.table[part] for part in ids.chunk(2, dim=1)], 1)
        if self.way == "one-hot":
            return functional.one_hot(ids, self.tokens).float() @ self.table
        assert self.way == "remainder"
        return functional.embedding(ids % self.tokens, self.table)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        shape = (samples, ROWS["tokens"])
        return {"ids": torch.randint(2, shape), "target": torch.randint(2, shape)}


def reads_bytes(model: nn.Module) -> bool:
    """Whether a forward with the loss, in torch alone, takes bytes up to the largest."""
    shape = (ROWS["samples"], ROWS["tokens"])
    ids = torch.full(shape, 255)
    try:
        functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(("tokens", "classes"), [(256, 256), (255, 256), (256, 255), (300, 400)])
@pytest.mark.parametrize(
    "way", ["embedding", "index", "reshaped", "sliced", "split", "one-hot", "remainder"]
)
def test_text_is_refused_where_torch_fails_on_it(way: str, tokens: int, classes: int) -> None:
    arguments: dict[str, Any] = {"way": way, "tokens": tokens, "classes": classes}
    job = JOB.model_copy(update={"model_arguments": arguments})
    problem = text_problem_of_step(trace_step(Reader, job).exported, job)
    assert (problem is None) == reads_bytes(Reader(**arguments))


@pytest.mark.parametrize("way", ["embedding", "index", "one-hot"])
def test_a_batch_is_refused_where_torch_fails_on_it(way: str) -> None:
    model = Reader(way, 8, 8)
    found = lookups(export_step(model, model.example_batch(2), JOB))
    for value in (-9, -8, -1, 0, 7, 8):
        ids = torch.full((ROWS["samples"], ROWS["tokens"]), value)
        try:
            fails = not model(ids).numel()
        except (IndexError, RuntimeError):
            fails = True
        assert any(row.problem({"ids": ids}) for row in found) == fails, value


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("gpt:gpt_tiny", {}, None),
        (
            "gpt:gpt_tiny",
            {"vocabulary": 100},
            "wte.weight of the model takes 'ids' below 100 only, but --data text has 256 kinds of "
            "bytes",
        ),
        (
            "vit:vit_tiny",
            {},
            "--data text needs a model that reads one int64 input of shape [samples, tokens] and "
            "has a target of the same shape; this one's batch is images (2, 3, 32, 32), target "
            "(2,)",
        ),
    ],
)
def test_what_text_lacks_is_said_in_a_sentence(
    name: str, arguments: dict[str, Any], problem: str | None
) -> None:
    job = JOB.model_copy(update={"model_arguments": arguments})
    step = trace_step(import_factory(f"models.{name}"), job)
    assert text_problem_of_step(step.exported, job) == problem


def test_one_tensor_as_input_and_target_stays_two_inputs() -> None:
    model = Reader("embedding", 8, 8)
    ids = torch.zeros(2, 6, dtype=torch.int64)
    exported = export_step(model, {"ids": ids, "target": ids}, JOB)
    tokens, target = torch.randint(8, (2, 6)), torch.randint(8, (2, 6))
    with torch.no_grad():
        model.table.copy_(torch.randn(8, 4))
        found = exported.module(ids=tokens, target=target)
        expected = functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
    torch.testing.assert_close(found, expected)
