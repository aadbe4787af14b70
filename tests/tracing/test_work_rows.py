"""What tracing files under which class of operation, counted by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.job import Job
from planner.model.graph_record import Layer
from planner.tracing.trace import trace

SAMPLES, TOKENS, WIDTH, HEADS = 2, 8, 16, 4
ELEMENT = 4


class Mixer(nn.Module):
    """Two equal products, attention, a convolution and a norm."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """[samples, tokens, width] to the same."""
        mixed = self.second(self.first(rows))
        heads = mixed.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal)
        mixed = mixed.transpose(1, 2).flatten(2).transpose(1, 2)
        return self.norm(self.convolution(mixed).transpose(1, 2))


class Model(nn.Module):
    """One layer, behind another so that its input takes a gradient."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Mixer(causal)])

    def forward(self, rows: Tensor) -> Tensor:
        """[samples, tokens, width] to the same."""
        for layer in self.h:
            rows = layer(rows)
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random rows and targets."""
        shape = (samples, TOKENS, WIDTH)
        return {"rows": torch.randn(shape), "target": torch.randn(shape)}


def traced(causal: bool = True) -> Layer:
    job = Job(samples_per_microbatch=SAMPLES, loss="mse")
    return trace(Model, job, causal=causal).layers["h.1"]


def rows_of(layer: Layer, phase: str) -> dict[str, tuple[int, int, int]]:
    """Operations, FLOPs and bytes by class; every class stands in one row here."""
    found = [row for row in layer.work if row.phase == phase]
    assert len({row.operation_class for row in found}) == len(found)
    return {r.operation_class: (r.operations, r.flops, r.traffic_bytes) for r in found}


PRODUCT = 2 * SAMPLES * TOKENS * WIDTH**2
CONVOLUTION = 3 * PRODUCT
ATTENTION = 4 * SAMPLES * TOKENS**2 * WIDTH
ACTIVATION = SAMPLES * TOKENS * WIDTH * ELEMENT
WEIGHT = WIDTH**2 * ELEMENT


def test_operations_stand_under_their_class_and_equal_ones_in_one_row() -> None:
    found = rows_of(traced(), "forward")
    assert found["product"] == (2, 2 * PRODUCT, 2 * (2 * ACTIVATION + WEIGHT))
    assert found["convolution"] == (1, CONVOLUTION, 2 * ACTIVATION + 3 * WEIGHT)
    # Queries, keys and values are one tensor here; it is read, the output written.
    assert found["causal_attention"] == (1, ATTENTION, 2 * ACTIVATION)
    assert found["memory"][1] == 0


def test_attention_is_causal_only_where_the_model_says_so() -> None:
    found = rows_of(traced(causal=False), "forward")
    assert "causal_attention" not in found
    assert found["attention"] == (1, ATTENTION, 2 * ACTIVATION)


def test_backwards_have_the_classes_of_their_forwards() -> None:
    layer = traced()
    inputs, weights = (rows_of(layer, f"{which}_gradient") for which in ("input", "weight"))
    assert inputs["product"][:2] == weights["product"][:2] == (2, 2 * PRODUCT)
    assert inputs["convolution"][:2] == weights["convolution"][:2] == (1, CONVOLUTION)
    assert inputs["causal_attention"][:2] == (1, ATTENTION * 5 // 2)
    assert "causal_attention" not in weights


def test_every_trainable_parameter_is_added_to_its_gradient() -> None:
    """Two reads and a write of two matrices, a convolution of three and a norm of two vectors."""
    operations, _, bytes_ = rows_of(traced(), "weight_gradient")["memory"]
    assert operations == 5
    assert bytes_ == 3 * (5 * WEIGHT + 2 * WIDTH * ELEMENT)


def test_frozen_parameters_have_no_gradient_to_add_to() -> None:
    def frozen() -> nn.Module:
        model = Model()
        for parameter in model.h[1].parameters():
            parameter.requires_grad_(False)
        return model

    layer = trace(frozen, Job(samples_per_microbatch=SAMPLES, loss="mse")).layers["h.1"]
    assert rows_of(layer, "weight_gradient") == {}
