"""FLOPs of the zoo's full sizes against formulas over the published tables of architectures.

A training step of a transformer costs ``6 * N * T`` and attention (Kaplan et al. 2020, section
2.1; Narayanan et al. 2021, appendix): N counts the parameters of matrix products, so the head but
no embedding and no norm, T the tokens; each product is computed once forward and twice backward.
Attention multiplies queries by keys and scores by values, ``4 * S * S * width`` a layer and sample
as if nothing were masked; fused kernels compute the scores again in the backward, five products in
place of four (Dao 2023).
"""

from dataclasses import dataclass
from functools import cache

import pytest

from models import ZOO
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.tracing.trace import trace

pytestmark = pytest.mark.extensive

TOLERANCE = 0.02


@dataclass(frozen=True)
class Flops:
    """Forward, and the two gradients of the backward."""

    forward: int
    input_gradient: int
    weight_gradient: int


def transformer(products: int, attention: int) -> Flops:
    """By the FLOPs of a forward's products with weights and of its attention."""
    return Flops(products + attention, products + attention * 5 // 2, products)


def total(graph: LayerGraph) -> Flops:
    rows = graph.record.layers
    return Flops(
        sum(row.forward_flops for row in rows),
        sum(row.input_gradient_flops for row in rows),
        sum(row.weight_gradient_flops for row in rows),
    )


@cache
def traced(factory: str, **arguments: int) -> Flops:
    """All of its FLOPs are counted, and weights of full sizes take no memory."""
    graph = trace(factory, Job(precision="bfloat16"), **arguments)
    assert graph.record.flop_coverage == 1
    return total(graph)


def decoder(layers: int, width: int, ffn: int, vocabulary: int, tokens: int, **more: int) -> Flops:
    """GPT-2 with two matrices in its MLP, Llama with three; keys and values may be narrower."""
    kv_width, matrices = more.get("kv_width", width), more.get("matrices", 2)
    weights = layers * (2 * width**2 + 2 * width * kv_width + matrices * width * ffn)
    products = 2 * (weights + width * vocabulary) * tokens
    return transformer(products, 4 * layers * tokens**2 * width)


GPT2 = {"gpt2_small": (12, 768), "gpt2_medium": (24, 1024), "gpt2_xl": (48, 1600)}


@pytest.mark.parametrize("key", GPT2)
def test_gpt2(key: str) -> None:
    layers, width = GPT2[key]
    expected = decoder(layers, width, 4 * width, 50257, 1024)
    assert_near(traced(ZOO[key]), expected)


def test_llama_7b() -> None:
    expected = decoder(32, 4096, 11008, 32000, 4096, matrices=3)
    found = traced(ZOO["llama2_7b"])
    assert_near(found, expected)
    # Touvron et al. 2023, table 2 trains 6.7 billion parameters: 6 N T of all but the embedding.
    products = 3 * (expected.weight_gradient)
    assert products == pytest.approx(6 * (6.738e9 - 32000 * 4096) * 4096, rel=1e-3)


def test_llama_70b_by_its_first_layers() -> None:
    """Layers are alike: one and two of them tell the FLOPs of eighty, exactly."""
    sizes = {"width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocabulary": 32000}
    one, two = (
        traced("models.llama:llama_tiny", layers=n, sequence_length=4096, **sizes) for n in (1, 2)
    )
    found = Flops(*(a + 79 * (b - a) for a, b in zip(fields(one), fields(two), strict=True)))
    expected = decoder(80, 8192, 28672, 32000, 4096, matrices=3, kv_width=1024)
    assert_near(found, expected)
    assert 3 * expected.weight_gradient == pytest.approx(6 * 68.7e9 * 4096, rel=0.01)


def test_a_small_llama_with_grouped_queries_grows_by_equal_layers() -> None:
    """What the test above rests on."""
    one, two, five = (fields(traced(ZOO["llama_tiny"], layers=n)) for n in (1, 2, 5))
    assert five == tuple(a + 4 * (b - a) for a, b in zip(one, two, strict=True))


def test_bert_large() -> None:
    layers, width, tokens = 24, 1024, 512
    weights = layers * 12 * width**2 + width**2 + width * 30522  # With the head's transform.
    expected = transformer(2 * weights * tokens, 4 * layers * tokens**2 * width)
    assert_near(traced(ZOO["bert_large"]), expected)


def test_t5_base() -> None:
    """A decoder layer attends twice; both texts have 512 tokens; heads fill the width."""
    layers, width, ffn, tokens = 12, 768, 3072, 512
    weights = layers * (12 * width**2 + 4 * width * ffn) + width * 32128
    attention = 3 * 4 * layers * tokens**2 * width
    assert_near(traced(ZOO["t5_base"]), transformer(2 * weights * tokens, attention))


def test_vit_base() -> None:
    """A class token beside 14 x 14 patches of 16 x 16 pixels, and 1,000 classes of it alone."""
    layers, width, tokens, giga_mac = 12, 768, 197, 17.56
    products = 2 * (layers * 12 * width**2 * tokens + 196 * 3 * 16**2 * width + 1000 * width)
    attention = 4 * layers * tokens**2 * width
    found = traced(ZOO["vit_base_16"])
    assert found.forward == pytest.approx(products + attention, rel=TOLERANCE)
    assert found.weight_gradient == pytest.approx(products, rel=TOLERANCE)
    # What torchvision publishes for its weights; it does not count the products of attention.
    assert found.forward == pytest.approx(2e9 * giga_mac, rel=0.05)


def test_resnet50_layer_by_layer() -> None:
    """He et al. 2016, table 1, with the stride in the 3 x 3 convolutions: 4.09 GMAC."""
    macs = 112**2 * 64 * 3 * 49  # conv1
    width_in, size = 64, 56
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        out = size if stage == 0 else size // 2
        for block in range(blocks):
            before = size if block == 0 else out
            macs += before**2 * width_in * width + out**2 * 9 * width**2 + out**2 * 4 * width**2
            if block == 0:
                macs += out**2 * width_in * 4 * width
            width_in = 4 * width
        size = out
    macs += 2048 * 1000
    assert macs == pytest.approx(4.09e9, rel=0.005)
    found = traced(ZOO["resnet50"])
    assert found.forward == pytest.approx(2 * macs, rel=1e-3)
    assert found.weight_gradient == pytest.approx(2 * macs, rel=1e-3)
    # The image takes no gradient.
    first = 2 * 112**2 * 64 * 3 * 49
    assert found.input_gradient == pytest.approx(2 * macs - first, rel=1e-3)


def fields(flops: Flops) -> tuple[int, ...]:
    return flops.forward, flops.input_gradient, flops.weight_gradient


def assert_near(found: Flops, expected: Flops) -> None:
    assert fields(found) == pytest.approx(fields(expected), rel=TOLERANCE)
