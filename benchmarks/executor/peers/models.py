"""The models' parts as torch's users split them: modules of whole blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.gpt import GPT, gpt_tiny
from models.llama import Llama
from models.rope import rope_tables


def untied_gpt(**arguments: Any) -> GPT:
    """A GPT whose head has weights of its own: torch's runtime sums no tied gradients."""
    model = gpt_tiny(**arguments)
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
    return model


class GPTPart(nn.Module):
    """Blocks of a GPT, with the embeddings before them or the head after them."""

    def __init__(self, model: GPT, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop
        self.h = nn.ModuleDict({str(index): model.h[index] for index in blocks})
        if is_last:
            self.ln_f, self.lm_head = model.ln_f, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids to hidden states to logits."""
        if self.is_first:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
            hidden = self.drop(self.wte(hidden) + self.wpe(positions))
        for block in self.h.values():
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden)) if self.is_last else hidden


class LlamaPart(nn.Module):
    """Layers of a Llama, with the embedding before them or the head after them."""

    def __init__(self, model: Llama, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.embed_tokens = model.embed_tokens
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in blocks})
        if is_last:
            self.norm, self.lm_head = model.norm, model.lm_head
        config = model.config
        device = torch.device("cpu")
        tables = rope_tables(config.sequence_length, config.head_size, config.rope_base, device)
        self.cos, self.sin = tables

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids to hidden states to logits."""
        if self.is_first:
            hidden = self.embed_tokens(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, self.cos, self.sin)
        return self.lm_head(self.norm(hidden)) if self.is_last else hidden


PARTS: dict[str, type[GPTPart] | type[LlamaPart]] = {"gpt": GPTPart, "llama": LlamaPart}
