"""Attention whose core runs again in the backward: the results of plain torch, with less held."""

from functools import partial

import pytest
import torch
from held_bytes import allocated
from in_turn import assert_same, cut_everywhere, run_stages, run_whole, used_by_many
from torch import Tensor, nn
from traces import trace_once

from executor.stage.runner import StageRunner
from models import ZOO
from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.factory import example_batch, import_factory
from planner.tracing.trace import trace

pytestmark = pytest.mark.usefixtures("shared_exports")
WIDTH, HEADS, TOKENS, SAMPLES = 32, 4, 16, 3
ROUND = 64
"""Bytes of scalars, such as what a recomputed core starts from besides."""
KEEPING = Job(samples_per_microbatch=SAMPLES)
AGAIN = KEEPING.model_copy(update={"recompute_attention": True})


class Blocks(nn.Module):
    """Two blocks of unfused attention with a mask; and a head.

    Args:
        writes: whether the mask changes once it has been used, for which no gradient needs it.
    """

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        self.h = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def extra_repr(self) -> str:
        """Tell exports of the two forms apart."""
        return f"writes={self.writes}"

    def forward(self, hidden: Tensor) -> Tensor:
        """Classify every position."""
        for block in self.h:
            query, key, value = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for part in block(hidden).chunk(3, dim=-1)
            )
            mask = hidden.detach()[:, None, :, :TOKENS] * 2
            scores = query @ key.transpose(-2, -1) / 8 + mask
            hidden = (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)
            if self.writes:
                mask.mul_(0)
                hidden = hidden + mask.sum()
        return self.head(hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw inputs and targets."""
        shape = (samples, TOKENS)
        return {"hidden": torch.randn(*shape, WIDTH), "target": torch.randint(5, shape)}


@pytest.mark.parametrize("split", [(), (0,)], ids=["whole", "split"])
@pytest.mark.parametrize(
    "name", ["blocks", "gpt_tiny", pytest.param("t5_tiny", marks=pytest.mark.extensive)]
)
def test_gradients_are_those_of_plain_torch(name: str, split: tuple[int, ...]) -> None:
    """Bit by bit; T5's attention has a bias that is computed from weights, for all blocks."""
    factory = Blocks if name == "blocks" else import_factory(ZOO[name])
    model, cut_model, layers = cut_everywhere(factory, AGAIN)
    batch = example_batch(model, AGAIN)
    expected = run_whole(model, batch, AGAIN.loss)
    rounded = used_by_many(trace_once(factory, AGAIN))
    if name == "t5_tiny":
        # Blocks add up the gradients of the bias they share in another order.
        rounded |= dict(model.named_parameters()).keys()
    middle = len(layers) // 2
    found = run_stages(model, cut_model([layers[:middle], layers[middle:]]), batch, split)
    assert_same(found, expected, rounded)


def test_dropout_inside_draws_the_same_numbers_again() -> None:
    factory = partial(import_factory(ZOO["bert_tiny"]), dropout=0.3)
    model, cut_model, layers = cut_everywhere(factory, AGAIN)
    batch = example_batch(model, AGAIN)
    torch.manual_seed(5)
    expected = run_whole(model, batch, AGAIN.loss)
    found = run_stages(model, cut_model([layers]), batch, seed=5)
    assert_same(found, expected, used_by_many(trace(factory, AGAIN)))


def test_a_forward_holds_less_by_what_the_trace_says() -> None:
    held, stash = [], []
    for job in (KEEPING, AGAIN):
        model, cut_model, layers = cut_everywhere(Blocks, job)
        (stage,) = cut_model([layers])
        runner, batch = StageRunner(stage, 1), example_batch(model, job)
        with allocated() as change:
            runner.forward(0, (), batch)
        held.append(change.bytes)
        stash.append(sum(row.stash_bytes for row in trace(Blocks, job).record.layers))
    assert held[0] - held[1] == pytest.approx(stash[0] - stash[1], abs=ROUND)
    assert stash[0] - stash[1] > 100 * ROUND


def test_what_is_written_before_the_backward_is_refused() -> None:
    _, cut_model, layers = cut_everywhere(partial(Blocks, writes=True), AGAIN)
    with pytest.raises(
        PipeplanError, match=r"recompute_attention: true, .* layer 'h\.0' .* is written in place"
    ):
        cut_model([layers])
