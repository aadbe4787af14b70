"""The zoo keeps its contract, has the published sizes and computes what the papers say."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import ZOO
from models.bert import IGNORED
from models.mixtral import DenseMixture, MixtralConfig, MixtureOfExperts
from models.t5 import RelativeBias, T5Config

TINY = [key for key in ZOO if key.endswith("_tiny")]

# As the papers' authors and the reference implementations give them.
PUBLISHED_PARAMETERS = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "vit_base_16": 86_567_656,
    "vit_large_16": 304_326_632,
    "mixtral_8x7b": 46_702_792_704,
    "inception_v3": 23_834_568,
}

# Logits of the tiny models for a batch of two.
LOGITS = {
    "gpt_tiny": (2, 64, 256),
    "llama_tiny": (2, 64, 256),
    "vgg_tiny": (2, 10),
    "resnet_tiny": (2, 10),
    "unet_tiny": (2, 2, 32, 32),
    "bert_tiny": (2, 32, 256),
    "t5_tiny": (2, 24, 256),
    "vit_tiny": (2, 10),
    "mixtral_tiny": (2, 32, 256),
    "gnmt_tiny": (2, 10, 256),
    "inception_tiny": (2, 10),
}


class WithLoss(nn.Module):
    """A model followed by the cross entropy of its logits."""

    def __init__(self, model: nn.Module, language: bool) -> None:
        super().__init__()
        self.model = model
        self.language = language

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        """Return the mean loss of the batch."""
        logits = self.model(**inputs)
        if self.language:
            logits, target = logits.flatten(0, 1), target.flatten()
        return functional.cross_entropy(logits, target)


def factory(key: str) -> Callable[..., nn.Module]:
    module, name = ZOO[key].split(":")
    return getattr(importlib.import_module(module), name)


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "target"}


def test_the_zoo_is_listed_without_importing_torch() -> None:
    code = "import models, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_zoo_lists_every_factory() -> None:
    found = set()
    for path in {entry.split(":")[0] for entry in ZOO.values()}:
        module = importlib.import_module(path)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            result = inspect.signature(function).return_annotation
            public = function.__module__ == path and not name.startswith("_")
            if public and inspect.isclass(result) and issubclass(result, nn.Module):
                found.add((name, f"{path}:{name}"))
    assert found == set(ZOO.items())


@pytest.mark.parametrize("key", ZOO)
def test_a_model_builds_without_memory(key: str) -> None:
    with torch.device("meta"):
        model = factory(key)()
        batch = model.example_batch(3)
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert "target" in batch
    assert set(inputs_of(batch)) == set(inspect.signature(model.forward).parameters)
    assert {tensor.shape[0] for tensor in batch.values()} == {3}
    if key in PUBLISHED_PARAMETERS:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == PUBLISHED_PARAMETERS[key]


@pytest.mark.parametrize("key", TINY)
def test_a_tiny_model_trains_on_the_cpu(key: str) -> None:
    torch.manual_seed(0)
    model = factory(key)()
    batch = model.example_batch(2)
    assert model(**inputs_of(batch)).shape == LOGITS[key]
    loss = WithLoss(model, language="ids" in batch)(**batch)
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("key", ["gpt_tiny", "llama_tiny", "mixtral_tiny"])
def test_a_language_model_does_not_see_the_future(key: str) -> None:
    torch.manual_seed(0)
    model = factory(key)(sequence_length=12)
    ids = model.example_batch(2)["ids"]
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_gpt_ties_the_head_to_the_embedding() -> None:
    model = factory("gpt_tiny")()
    assert model.lm_head.weight is model.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("key", ["t5_tiny", "gnmt_tiny"])
def test_a_decoder_sees_all_the_input_and_no_future_output(key: str) -> None:
    torch.manual_seed(0)
    model = factory(key)(sequence_length=9).double()
    batch = inputs_of(model.example_batch(2))
    before = model(**batch)
    for name, first_seen in (("ids", 0), ("decoder_ids", 5)):
        changed = batch[name].clone()
        changed[:, 5] = (changed[:, 5] + 1) % 256
        after = model(**{**batch, name: changed})
        differs = (before != after).flatten(2).any(-1).all(0)
        assert differs.tolist() == [position >= first_seen for position in range(9)], name


def test_bert_attends_to_no_padding_and_predicts_where_it_is_asked() -> None:
    torch.manual_seed(0)
    model = factory("bert_tiny")()
    batch = model.example_batch(2)
    asked = batch["target"] != IGNORED
    assert 0 < asked.sum() < asked.numel() / 2
    before = model(**inputs_of(batch))
    batch["ids"] = torch.where(batch["mask"], batch["ids"], (batch["ids"] + 1) % 256)
    after = model(**inputs_of(batch))
    kept = batch["mask"]
    torch.testing.assert_close(before[kept], after[kept])
    assert not torch.allclose(before[~kept], after[~kept])


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_t5_are_those_of_the_library(causal: bool) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-300, 301)[None]
    expected = modeling.T5Attention._relative_position_bucket(
        offsets, bidirectional=not causal, num_buckets=32, max_distance=128
    )
    bias = RelativeBias(T5Config(1, 8, 2, 4, 8), causal)
    assert bias._bucket(offsets).equal(expected)


def test_a_mixture_is_the_weighted_sum_of_the_two_best_experts() -> None:
    """The oracle takes one token after the other to the two experts with the highest scores."""
    torch.manual_seed(0)
    config = MixtralConfig(1, 16, 2, 2, ffn=24, experts=5)
    mixture = DenseMixture(config)
    hidden = torch.randn(3, 7, 16)
    found = mixture(hidden)
    for place in torch.cartesian_prod(torch.arange(3), torch.arange(7)).tolist():
        token = hidden[tuple(place)]
        scores = mixture.gate(token)
        best = sorted(range(5), key=lambda index: -scores[index].item())[:2]
        shares = scores[best].softmax(0)
        expected = sum(
            share * mixture.experts[index](token) for share, index in zip(shares, best, strict=True)
        )
        torch.testing.assert_close(found[tuple(place)], expected)


def test_tokens_sent_to_their_experts_give_what_all_experts_do() -> None:
    """Values and gradients; the oracle computes all experts. Of five, one gets no token."""
    torch.manual_seed(0)
    config = MixtralConfig(1, 16, 2, 2, ffn=24, experts=5)
    sparse, dense = MixtureOfExperts(config).double(), DenseMixture(config).double()
    sparse.gate.weight.data[3] = 0
    sparse.gate.weight.data[3, 0] = -100
    for index, expert in enumerate(dense.experts):
        for name, weight in expert.named_parameters():
            own = getattr(sparse.experts, name.removesuffix(".weight"))
            weight.data.copy_(own.data[index])
    dense.gate.load_state_dict(sparse.gate.state_dict())
    tokens = torch.randn(3, 7, 16).double().abs()
    inputs = [tokens.clone().requires_grad_() for _ in range(2)]
    found, expected = sparse(inputs[0]), dense(inputs[1])
    torch.testing.assert_close(found, expected)
    factor = torch.randn_like(found)
    (found * factor).sum().backward()
    (expected * factor).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(sparse.gate.weight.grad, dense.gate.weight.grad)
    for name, weight in sparse.experts.named_parameters():
        rows = [getattr(expert, name).weight.grad for expert in dense.experts]
        torch.testing.assert_close(weight.grad, torch.stack(rows))
    assert not sparse.experts.up_proj.grad[3].any()
