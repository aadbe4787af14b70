"""Sizes at which models of Hugging Face transformers run in a test."""

from typing import Any

BLOCKS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {"vocab_size": 100, "sequence_length": 16}
LLAMA = {**BLOCKS, **TEXT, "num_key_value_heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_layer": 2, "n_embd": 32, "n_head": 4, **TEXT},
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4},
    "BertForMaskedLM": {**BLOCKS, **TEXT},
    "T5ForConditionalGeneration": {
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 48,
        **TEXT,
    },
    "ViTForImageClassification": {**BLOCKS, "image_size": 32, "patch_size": 8, "num_labels": 5},
}
