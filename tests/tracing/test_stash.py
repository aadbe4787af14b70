"""What layers keep for their backwards, against what autograd saves in a real forward."""

from collections.abc import Callable

import pytest
import torch
from classifiers import Classifier, convolutions, mlp, smooth_mlp
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from models import ZOO
from planner.job import Job
from planner.tracing.factory import import_factory
from planner.tracing.trace import trace


def kept_by_autograd(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes of all storages saved on the CPU in one real forward, weights and buffers excluded."""
    weights = [*model.parameters(), *model.buffers()]
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    target = batch.pop("target")
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**batch)
        if output.ndim == 3:
            output, target = output.flatten(0, 1), target.flatten()
        functional.cross_entropy(output, target)
    storages = [tensor.untyped_storage() for tensor in saved.values()]
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in known)


# These two have tests of their own below.
SAVED_OTHERWISE = ("t5_tiny", "gnmt_tiny")
ZOO_FACTORIES = [
    import_factory(ZOO[key]) for key in ZOO if key.endswith("_tiny") and key not in SAVED_OTHERWISE
]


@pytest.mark.extensive
@pytest.mark.parametrize("factory", [mlp, smooth_mlp, convolutions, *ZOO_FACTORIES])
def test_the_stash_is_what_autograd_keeps(factory: Callable[[], nn.Module]) -> None:
    samples = 3
    graph = trace(factory, Job(samples_per_microbatch=samples))
    model = factory()
    expected = kept_by_autograd(model, model.example_batch(samples))
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected


def test_attention_with_a_trained_bias_keeps_what_fused_kernels_do() -> None:
    """The CPU has no such kernel for a bias with a gradient and keeps the weights instead."""
    samples = 3
    factory = import_factory(ZOO["t5_tiny"])
    graph = trace(factory, Job(samples_per_microbatch=samples))
    model = factory()
    config = model.config
    rows = samples * config.heads * config.sequence_length
    with_bias = 2 * config.layers
    weights = 4 * with_bias * rows * config.sequence_length
    log_sums = 4 * with_bias * rows
    biases = 4 * 2 * config.heads * config.sequence_length**2
    expected = kept_by_autograd(model, model.example_batch(samples)) - weights + log_sums + biases
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_does_the_products_of_its_gates_and_keeps_them(bidirectional: bool) -> None:
    samples = 3

    class Recurrent(Classifier):
        def forward(self, rows: Tensor) -> Tensor:
            first, lstm, last = self.layers
            return last(lstm(first(rows))[0][:, -1])

    def factory() -> nn.Module:
        lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=bidirectional)
        last = nn.Linear(32 if bidirectional else 16, 4)
        return Recurrent(nn.Linear(8, 8), lstm, last, inputs=(5, 8))

    graph = trace(factory, Job(samples_per_microbatch=samples))
    assert graph.record.flop_coverage == 1
    lstm = graph.layers["layers.1"]
    products = 2 * samples * 5 * 4 * 16 * (8 + 16) * (2 if bidirectional else 1)
    assert lstm.forward_flops == products
    assert lstm.input_gradient_flops == lstm.weight_gradient_flops == products
    model = factory()
    with torch.backends.mkldnn.flags(enabled=False):  # It keeps a workspace of its own.
        expected = kept_by_autograd(model, model.example_batch(samples))
    # There the direction that runs backwards takes a copy of the input.
    copied = 4 * samples * 5 * 8 if bidirectional else 0
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected - copied


def test_the_stash_of_gnmt_is_what_autograd_keeps_but_for_a_copy() -> None:
    """On the CPU the product of all steps copies what the layer below hands over step by step."""
    factory = import_factory(ZOO["gnmt_tiny"])
    graph = trace(factory, Job(samples_per_microbatch=5))
    model = factory()
    with torch.backends.mkldnn.flags(enabled=False):
        expected = kept_by_autograd(model, model.example_batch(5))
    config = model.config
    copied = 4 * 5 * config.sequence_length * config.width
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected - copied
