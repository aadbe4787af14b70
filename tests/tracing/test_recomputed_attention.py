"""Attention whose core runs again in the backward: what layers keep and do, against real runs."""

from functools import partial
from typing import Any

import pytest
import torch
from builders import graph, layer, star
from test_stash import kept_by_autograd
from torch import Tensor, nn
from torch.nn import functional
from traces import in_groups

from planner import Job, PipeplanError, Problem, adopt, trace, verify
from planner.tracing.trace import trace_step
from planner.verification.costs import PlanCosts

WIDTH, HEADS, TOKENS, SAMPLES = 32, 4, 16, 3
AGAIN = Job(samples_per_microbatch=SAMPLES, recompute_attention=True)
KEEPING = Job(samples_per_microbatch=SAMPLES)
SCORES = SAMPLES * HEADS * TOKENS**2
COPIED_BYTES = 3 * 4 * SAMPLES * TOKENS * WIDTH
"""Query, key and value in the order that products of the heads need."""


class CoreAgain(torch.autograd.Function):
    """Attention that keeps query, key and value alone, as a checkpoint around its core does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        with torch.no_grad():
            return core(query, key, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("only the forward is run")


def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(-2, -1) / 8
    return torch.softmax(scores, dim=-1) @ value


class Block(nn.Module):
    """Attention and a product behind it; ``how`` mixes the values."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix, [samples, tokens, width] to the same."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.inner(hidden).chunk(3, dim=-1)
        )
        return self.outer(self.how(query, key, value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(how), Block(how)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Classify every position."""
        for block in self.h:
            hidden = block(hidden)
        return self.head(hidden)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Draw inputs and targets."""
        shape = (samples, TOKENS)
        return {"hidden": torch.randn(*shape, WIDTH), "target": torch.randint(5, shape)}


unfused = partial(Model, core)
fused = partial(Model, functional.scaled_dot_product_attention)


@pytest.mark.parametrize(
    ("factory", "scores_bytes", "copied_bytes"),
    # A softmax in float32; fused attention keeps a logarithm for each row of the scores.
    [(unfused, 4 * SCORES, COPIED_BYTES), (fused, 4 * SCORES // TOKENS, 0)],
    ids=["unfused", "fused"],
)
def test_layers_keep_what_a_checkpoint_around_the_core_does(
    factory: Any, scores_bytes: int, copied_bytes: int
) -> None:
    keeping, again = (trace(factory, job, name="model").record for job in (KEEPING, AGAIN))
    model = Model(CoreAgain.apply)
    expected = kept_by_autograd(model, model.example_batch(SAMPLES))
    assert sum(row.stash_bytes for row in again.layers) == expected
    for before, after in zip(keeping.layers[:2], again.layers[:2], strict=True):
        assert before.stash_bytes - after.stash_bytes == scores_bytes
        assert after.again_bytes == scores_bytes + copied_bytes


@pytest.mark.parametrize("factory", [unfused, fused], ids=["unfused", "fused"])
def test_the_forward_of_the_core_is_in_the_input_gradient_too(factory: Any) -> None:
    """Two products of the scores with heads of 8: 2 * 2 * 8 FLOPs each."""
    keeping, again = (trace(factory, job, name="model").record for job in (KEEPING, AGAIN))
    for before, after in zip(keeping.layers[:2], again.layers[:2], strict=True):
        more = after.input_gradient_flops - before.input_gradient_flops
        assert more == SCORES * 2 * 2 * (WIDTH // HEADS)
        assert after.input_gradient_traffic_bytes > before.input_gradient_traffic_bytes
        for name in ("forward_flops", "weight_gradient_flops", "forward_traffic_bytes"):
            assert getattr(after, name) == getattr(before, name)


def test_what_runs_again_is_held_while_its_layer_runs() -> None:
    keeping, again = (trace(unfused, job, name="model") for job in (KEEPING, AGAIN))
    # What the core starts from is held beside the copies.
    assert again.peak_bytes["h.0"] == keeping.peak_bytes["h.0"] + COPIED_BYTES
    cluster = star(2)
    plans = [
        adopt(
            Problem(found, cluster, job.model_copy(update={"microbatches": 2})),
            [["h.0"], ["h.1", "head"]],
        )
        for found, job in ((keeping, KEEPING), (again, AGAIN))
    ]
    assert [verify(plan) for plan in plans] == [[], []]
    held, less = (PlanCosts(plan).bytes[0] for plan in plans)
    assert held.stash - less.stash == 4 * SCORES
    assert less.workspace - held.workspace == 4 * SCORES + COPIED_BYTES


@pytest.mark.parametrize("degree", [2, 4])
def test_a_group_shares_the_heads_of_what_runs_again(degree: int) -> None:
    job = AGAIN.model_copy(update={"tensor_parallel": degree})
    found = in_groups(trace_step(unfused, job, "model"), job).graph
    assert found.layers["h.0"].again_bytes == 4 * SCORES + COPIED_BYTES


def test_a_model_without_attention_is_refused() -> None:
    class Plain(Model):
        def __init__(self) -> None:
            super().__init__(lambda query, key, value: query + key + value)

    with pytest.raises(PipeplanError, match="no trained attention whose core is known"):
        trace(Plain, AGAIN)


def test_a_graph_that_was_traced_otherwise_is_refused() -> None:
    told = graph([layer("a")])
    with pytest.raises(PipeplanError, match="was traced with false; trace it again"):
        Problem(told, star(1), Job(recompute_attention=True))
    times = {"forward_s": 1, "input_gradient_s": 1, "weight_gradient_s": 1}
    measured = graph([layer("a", measured={"unit": times})], recomputes_attention=True)
    with pytest.raises(PipeplanError, match="'a' was measured whole"):
        Problem(measured, star(1), Job(recompute_attention=True))
