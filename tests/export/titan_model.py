"""torchtitan's own Llama 3, as ``pipeplan plan titan_model:build`` traces it."""

from torch import nn
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, llama3_configs


def configured(flavor: str) -> Llama3Model.Config:
    """With plain attention: the trainer's flex attention needs masks that it makes itself."""
    config = llama3_configs[flavor]("flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def build(flavor: str = "debugmodel") -> nn.Module:
    return configured(flavor).build()
