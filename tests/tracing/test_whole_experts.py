"""Whole experts on the members of a group: results against one device, figures by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from test_splits import equals_one_device, of_factory
from torch import Tensor, nn
from traces import in_groups
from transformer_sizes import TINY

from models.mixtral import Experts
from planner import Job
from planner.errors import PipeplanError
from planner.model.graph_record import Layer
from planner.model.split_record import SplitRecord
from planner.tracing import expert_operations
from planner.tracing.expert_operations import grouped_product
from planner.tracing.sharding.record import record_of
from planner.tracing.trace import TracedStep, trace_step

MIXTRAL = "models.mixtral:mixtral_tiny"
TOKENS, CHOICES, WIDTH, FFN, EXPERTS, FLOAT = 64, 2, 32, 48, 4, 4
ROWS = TOKENS * CHOICES
BLOCK = "layers.1"


def test_members_with_whole_experts_compute_what_one_device_does() -> None:
    """Tokens that all have, and of shared positions; each member computes its experts' rows."""
    two, two_shared, four, four_shared = of_factory(MIXTRAL, {"kv_heads": 4}, experts=True)
    blocks = 2
    for calls in (two, four):
        assert (calls["own_rows"], calls["own_sums"], calls["send_rows"]) == (blocks, blocks, 0)
    for calls in (two_shared, four_shared):
        assert (calls["own_rows"], calls["send_rows"], calls["return_rows"]) == (0, blocks, blocks)
        assert calls["expert_counts"] == blocks


class Reshaped(nn.Module):
    """Experts of a model of its own: tokens in one dimension, an unused expert, a sum after."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.gate = nn.Linear(8, 8)
        self.experts = Experts(8, 8, 6)
        self.scale = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        flat = hidden.flatten(0, 1)
        scores = self.gate(flat) - 1e4 * (torch.arange(8) == 5)
        weights, chosen = scores.softmax(-1).topk(3, dim=-1)
        mixed = self.experts(flat, chosen, weights) * self.scale
        return self.head(hidden + mixed.view_as(hidden))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {name: torch.randint(20, (samples, 10)) for name in ("ids", "target")}


def test_experts_of_another_model_do_so_too() -> None:
    torch.manual_seed(0)
    for calls in equals_one_device(Reshaped(), {}, experts=True):
        # Its tokens are in one dimension, whose positions are not shared.
        assert (calls["own_rows"], calls["send_rows"]) == (1, 0)


@pytest.mark.parametrize("samples", [1, 2])
def test_so_do_those_of_hugging_face(samples: int) -> None:
    """Its models flatten samples and positions: those of one sample are shared by positions."""
    pytest.importorskip("transformers")
    name = "MixtralForCausalLM"
    arguments = {**TINY[name], "num_key_value_heads": 4}
    runs = of_factory(f"hf:{name}", arguments, experts=True, samples=samples)
    sent = [(calls["own_rows"], calls["send_rows"]) for calls in runs]
    assert sent == [(2, 0), (0, 2) if samples == 1 else (2, 0)] * 2


def test_one_kernel_for_all_experts_computes_what_one_product_each_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's kernel, of which torch has a form for CPUs too; one expert has no rows."""
    torch.manual_seed(0)
    made = [torch.randn(24, 16), torch.randn(3, 32, 16) / 4]
    factor = torch.randn(24, 32).bfloat16()

    def run() -> tuple[Tensor, ...]:
        rows, matrices = (x.bfloat16().requires_grad_() for x in made)
        found = grouped_product(rows, matrices.transpose(1, 2), torch.tensor([10, 10, 24]))
        (found * factor).sum().backward()
        return found.detach(), rows.grad, matrices.grad

    expected = run()
    monkeypatch.setattr(expert_operations, "has_kernel", lambda rows, matrices: True)
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@cache
def traced() -> TracedStep:
    return trace_step(MIXTRAL, Job(samples_per_microbatch=2))


def record(degree: int, load: tuple[float, ...] = (), *, sequence: bool = False) -> SplitRecord:
    return record_of(traced(), degree, sequence=sequence, experts=(load,) if load else ())


def of_group(degree: int, load: tuple[float, ...] = (), *, sequence: bool = False) -> Layer:
    """A block as a group runs it: figures of all devices together."""
    job = Job(
        samples_per_microbatch=2,
        tensor_parallel=degree,
        sequence_parallel=sequence,
        expert_parallel=True,
        expert_load=load or None,
    )
    return in_groups(traced(), job).graph.layers[BLOCK]


def test_members_hold_equally_many_experts() -> None:
    (region,) = (row for row in record(2).regions if row.kind == "experts" and BLOCK in row.layers)
    assert region.sizes == (EXPERTS,)
    names = {f"{BLOCK}.block_sparse_moe.experts.{n}_proj" for n in ("gate", "up", "down")}
    assert {(p.name, p.dimension, p.parts) for p in region.parameters} == {
        (name, 0, (EXPERTS,)) for name in names
    }


def test_balanced_experts_are_shared_as_columns_are() -> None:
    by_columns = record_of(traced(), 2)
    (columns,) = (row for row in by_columns.layers if row.name == BLOCK)
    (whole,) = (row for row in record(2).layers if row.name == BLOCK)
    assert whole.flops == columns.flops
    assert whole.parameter_bytes == columns.parameter_bytes


@pytest.mark.parametrize(
    ("degree", "load", "most"),
    [(2, (1, 1, 1, 1), 1), (2, (3, 1, 1, 1), 4 / 3), (4, (3, 1, 1, 1), 2), (2, (1, 1, 0, 0), 2)],
)
def test_the_member_with_the_most_tokens_decides(
    degree: int, load: tuple[float, ...], most: float
) -> None:
    """All members take as long as if each had as many rows as the one with the most.

    A block keeps of a row its input and output of the experts, and four times what is inside.
    """
    balanced, loaded = of_group(degree), of_group(degree, load)
    flops = 3 * 2 * ROWS * WIDTH * FFN
    assert loaded.forward_flops - balanced.forward_flops == pytest.approx((most - 1) * flops)
    for kind in ("input", "weight"):
        name = f"{kind}_gradient_flops"
        more = getattr(loaded, name) - getattr(balanced, name)
        assert more == pytest.approx((most - 1) * flops, abs=9)
    kept = FLOAT * ROWS * (2 * WIDTH + 4 * FFN)
    more = loaded.stash_bytes - balanced.stash_bytes
    assert more == pytest.approx((most - 1) * kept, abs=9)
    products = sum(row.flops for row in loaded.work if row.phase == "forward")
    assert products == loaded.forward_flops


def test_each_layer_may_have_loads_of_its_own() -> None:
    loads = ((3.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0))
    own = record_of(traced(), 2, experts=loads)
    for layer, load in zip(("layers.0", "layers.1"), loads, strict=True):
        (found,) = (row for row in own.layers if row.name == layer)
        (expected,) = (row for row in record(2, load).layers if row.name == layer)
        assert found == expected


def test_matrices_are_read_whatever_the_rows() -> None:
    """With all tokens on one of two members, each counts as if it had all rows, but no matrices."""
    balanced, loaded = of_group(2), of_group(2, (1, 1, 0, 0))
    # Rows in and out of: dispatch, two products, SiLU, the product with it, one more, the sum.
    wide, inner = FLOAT * ROWS * WIDTH, FLOAT * ROWS * FFN
    tokens, ids, weights = FLOAT * TOKENS * WIDTH, 8 * ROWS, FLOAT * ROWS
    offsets = 8 * EXPERTS
    moved = {
        "dispatch": tokens + ids + wide,
        "gate and up": 2 * (wide + offsets + inner),
        "silu and its product": 2 * inner + 3 * inner,
        "down": inner + offsets + wide,
        "combine": wide + ids + weights + tokens,
    }
    more = loaded.forward_traffic_bytes - balanced.forward_traffic_bytes
    assert more == pytest.approx(sum(moved.values()), abs=9)


@pytest.mark.parametrize(("load", "most"), [((), 1.0), ((1.0, 2.0, 1.0, 0.0), 1.5)])
def test_rows_travel_twice_in_each_direction_with_shared_positions(
    load: tuple[float, ...], most: float
) -> None:
    """Each of two members sends the rows of its half of the tokens, where the most go."""
    (row,) = (row for row in record(2, load, sequence=True).layers if row.name == BLOCK)
    sent = Counter((c.phase, c.bytes) for c in row.collectives if c.kind == "all_to_all")
    bytes_ = most * FLOAT * ROWS * WIDTH / 2
    assert sent == {("forward", bytes_): 2, ("input_gradient", bytes_): 2}
    (counts,) = (c for c in row.collectives if c.bytes == 2 * 8 * EXPERTS)
    assert (counts.kind, counts.phase) == ("all_gather", "forward")


def test_without_shared_positions_nothing_travels() -> None:
    (row,) = (row for row in record(2).layers if row.name == BLOCK)
    assert {c.kind for c in row.collectives} == {"all_reduce"}


class Plain(nn.Module):
    """A model without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 8), "target": torch.randn(samples, 8)}


def test_experts_that_cannot_be_given_out_are_named() -> None:
    with pytest.raises(PipeplanError, match="3: does not divide the 4 experts of layer"):
        record(3)
    with pytest.raises(PipeplanError, match="expert_load: has 2 numbers, but layer"):
        record(2, (1.0, 2.0))
    with pytest.raises(PipeplanError, match="has lists for 3 layers, but 2 have experts"):
        record_of(traced(), 2, experts=((1.0,) * 4,) * 3)
    with pytest.raises(PipeplanError, match="the model sends no tokens to experts"):
        record_of(trace_step(Plain, Job(loss="mse")), 2, experts=())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"expert_parallel": True}, "set tensor_parallel to their number"),
        ({"tensor_parallel": 2, "expert_load": [1, 1]}, "set expert_parallel = true"),
        (
            {"tensor_parallel": 2, "expert_parallel": True, "expert_load": [0, 0]},
            "give at least one expert tokens",
        ),
        (
            {"tensor_parallel": 2, "expert_parallel": True, "expert_load": [[1, 1], [0, 0]]},
            "give at least one expert tokens",
        ),
    ],
)
def test_jobs_that_contradict_themselves_are_refused(fields: dict, told: str) -> None:
    with pytest.raises(PipeplanError, match=told):
        Job.parse(fields, "job")
