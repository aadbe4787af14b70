"""Traced boundaries, stash and figures against published ones; test_flop_formulas.py has FLOPs."""

from functools import cache

import networkx as nx
import pytest
import torch

from models import ZOO
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.tracing.factory import import_factory
from planner.tracing.trace import trace

pytestmark = pytest.mark.extensive

TINY = ("gpt_tiny", "t5_tiny", "mixtral_tiny", "resnet_tiny", "unet_tiny", "gnmt_tiny")


@cache
def traced(key: str, **arguments: int) -> LayerGraph:
    """All of its FLOPs are counted, and weights of full sizes take no memory."""
    graph = trace(ZOO[key], Job(), **arguments)
    assert graph.record.flop_coverage == 1
    return graph


def total(graph: LayerGraph, field: str) -> int:
    return sum(getattr(layer, field) for layer in graph.record.layers)


# --- what layers keep and send --------------------------------------------------------------------

LAYERS, WIDTH, TOKENS, VOCABULARY = 12, 768, 1024, 50257  # GPT-2, Radford et al. 2019.


def test_the_tied_embedding_stands_in_both_layers_under_one_name() -> None:
    graph = traced("gpt2_small")
    (shared,) = set(graph.layers["wte"].parameters) & set(graph.layers["lm_head"].parameters)
    assert graph.parameters[shared].elements == VOCABULARY * WIDTH
    holders = [layer.name for layer in graph.record.layers if shared in layer.parameters]
    assert holders == ["wte", "lm_head"]


def test_only_the_hidden_state_crosses_between_the_blocks_of_gpt2() -> None:
    graph = traced("gpt2_small")
    names = list(graph)
    for cut in range(1, len(names) - 2):  # The last cuts carry logits.
        (tensor,) = graph.crossing(names[:cut])
        assert tensor.shape == (1, TOKENS, WIDTH)
        assert tensor.bytes == 4 * TOKENS * WIDTH
        assert tensor.requires_grad


def test_a_block_of_gpt2_keeps_what_the_papers_say() -> None:
    """Korthikanti et al. 2022, section 4, without dropout masks and attention scores.

    In 16 bits it is 32 bytes a token and feature, in 32 bits twice that: two norms keep their
    inputs (4), attention its input, queries, keys, values and output (2 + 6 + 2), the MLP its
    input and those of GELU and of the second product (2 + 8 + 8).
    """
    graph = traced("gpt2_small")
    for index in range(1, LAYERS):
        kept = graph.layers[f"h.{index}"].stash_bytes
        assert kept == pytest.approx(2 * 32 * TOKENS * WIDTH, rel=0.01)


def test_rope_tables_do_not_cross_boundaries() -> None:
    """Every stage computes them itself; only the hidden state is sent on."""
    graph = traced("llama_tiny")
    names = list(graph)
    assert [name for name in names if name.startswith("layers.")] == [
        f"layers.{index}" for index in range(4)
    ]
    for cut in range(1, len(names) - 1):
        (tensor,) = graph.crossing(names[:cut])
        assert tensor.shape == ((1, 64, 64) if names[cut - 1] != "lm_head" else (1, 64, 256))


def test_the_skips_of_a_unet_cross_its_middle() -> None:
    graph = traced("unet_tiny")
    names = list(graph)
    assert names.index("bottom") == 2
    skips = {
        (tensor.producer, tensor.users)
        for tensor in graph.crossing(names[:3])
        if tensor.producer != "bottom"
    }
    assert skips == {("down.0", ("up.1",)), ("down.1", ("up.0",))}
    (first,) = (t for t in graph.record.boundaries if t.users == ("up.1",) and t.shape[1] == 8)
    assert first.shape == (1, 8, 32, 32)


# --- branches, experts, LSTMs ---------------------------------------------------------------------


def test_inception_v3_forward_does_5_7_gmac_in_branches() -> None:
    """Multiplications and additions as the reference implementations give them."""
    graph = traced("inception_v3")
    assert total(graph, "forward_flops") == pytest.approx(2 * 5.71e9, rel=0.01)
    branches = [f"mixed.block0.branches.{index}" for index in range(4)]
    assert set(branches) <= set(graph)
    # The first three read the stem; the last joins them all.
    assert set(graph.predecessors(branches[1])) == {"stem.6"}
    assert set(graph.predecessors(branches[3])) == {"stem.6", *branches[:3]}


@pytest.mark.parametrize(("dispatch", "parameters"), [(True, 12.9e9), (False, 46_702_792_704)])
def test_a_token_of_mixtral_uses_two_experts_or_all(dispatch: bool, parameters: float) -> None:
    """Jiang et al., 2024, section 2.1: 13 billion active parameters of 47; 12.9 in their post."""
    sizes = {"width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8}
    sizes |= {"vocabulary": 32000, "sequence_length": 2048, "dispatch": dispatch}
    one, two = (total(traced("mixtral_tiny", layers=n, **sizes), "forward_flops") for n in (1, 2))
    embedding, norms = 32000 * 4096, 65 * 4096
    products = 2 * (parameters - embedding - norms) * 2048
    attention = 4 * 32 * 2048**2 * 4096
    # Its 32 layers are alike.
    assert one + 31 * (two - one) == pytest.approx(products + attention, rel=2e-3)


def test_gnmt_multiplies_every_gate_at_every_token() -> None:
    graph = traced("gnmt", sequence_length=20)
    layer = graph.layers["encoder.3"]
    assert layer.forward_flops == 2 * 20 * 4 * 1024 * 2048
    assert layer.weight_gradient_flops == layer.input_gradient_flops == layer.forward_flops


# --- all models --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", TINY)
def test_a_layer_graph_is_acyclic_and_runs_forward(key: str) -> None:
    graph = traced(key)
    assert nx.is_directed_acyclic_graph(graph)
    position = {name: index for index, name in enumerate(graph)}
    for tensor in graph.record.boundaries:
        assert all(position[tensor.producer] < position[user] for user in tensor.users)
    assert nx.is_weakly_connected(graph)
    assert [name for name in graph if graph.out_degree(name) == 0] == ["loss"]


@pytest.mark.parametrize("key", TINY)
def test_every_parameter_of_the_zoo_is_in_some_layer(key: str) -> None:
    graph = traced(key)
    with torch.device("meta"):
        model = import_factory(ZOO[key])()
    found = {row.name: row.elements for row in graph.record.parameters if row.trainable}
    assert found == {name: weight.numel() for name, weight in model.named_parameters()}
    used = {name for layer in graph.record.layers for name in layer.parameters}
    assert used == {row.name for row in graph.record.parameters}


@pytest.mark.parametrize("key", TINY)
def test_work_grows_with_the_samples(key: str) -> None:
    once = traced(key)
    thrice = trace(ZOO[key], Job(samples_per_microbatch=3))
    assert list(thrice) == list(once)
    assert total(thrice, "forward_flops") == 3 * total(once, "forward_flops")
    for one, three in zip(once.record.boundaries, thrice.record.boundaries, strict=True):
        shared = one.producer in ("encoder_bias", "decoder_bias")  # T5's are alike for all samples.
        factor = 3 if one.shape and not shared else 1
        assert three.bytes == factor * one.bytes


@pytest.mark.parametrize("key", TINY)
def test_half_the_precision_halves_weights_and_messages(key: str) -> None:
    whole, half = traced(key), trace(ZOO[key], Job(precision="bfloat16"))
    size = {row.name: row.bytes for row in whole.record.parameters if row.trainable}
    for row in half.record.parameters:
        if row.trainable:
            assert 2 * row.bytes == size[row.name]
    for one, two in zip(whole.record.boundaries, half.record.boundaries, strict=True):
        if one.dtype == "float32" and two.dtype == "bfloat16":
            assert one.bytes == 2 * two.bytes
    assert {row.dtype for row in half.record.boundaries} >= {"bfloat16"}


def test_tracing_twice_gives_the_same_graph() -> None:
    assert trace(ZOO["unet_tiny"], Job()).digest == traced("unet_tiny").digest


def test_model_arguments_come_from_the_job_and_the_call() -> None:
    job = Job(model_arguments={"layers": 2, "width": 32})
    graph = trace(ZOO["gpt_tiny"], job, layers=3)
    assert [name for name in graph if name.startswith("h.")] == ["h.0", "h.1", "h.2"]
    assert graph.crossing(list(graph)[:4])[0].shape == (1, 64, 32)
