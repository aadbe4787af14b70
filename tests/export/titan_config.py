"""A configuration of torchtitan with an export's keys, as docs/export.md says, and random tokens.

``python -m titan_train --module titan_config --config planned`` starts torchtitan's trainer by it;
the environment variable ``EXPORTED`` names the folder.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from titan_model import configured
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

LENGTH, VOCABULARY = 16, 2048


class RandomTokens(BaseDataLoader):
    """Batches of tokens drawn by the number of the batch and the rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, local_batch_size: int, dp_rank: int, **_: Any) -> None:
        self.shape, self.seed = (local_batch_size, LENGTH), 1000 * dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in range(1000):
            draw = torch.Generator().manual_seed(self.seed + step)
            tokens = torch.randint(VOCABULARY, self.shape, generator=draw)
            positions = torch.arange(LENGTH).expand(self.shape)
            yield {"input": tokens, "positions": positions}, tokens.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Stands for none: tokens are drawn."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def planned() -> Trainer.Config:
    spec = model_registry("debugmodel", attn_backend="flex")
    config = Trainer.Config(
        model_spec=dataclasses.replace(spec, model=configured("debugmodel")),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3),
        dataloader=RandomTokens.Config(),
        tokenizer=NoTokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        # The default backend asks for a later torch than 2.13.0 where there are replicas.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )
    config.training = dataclasses.replace(config.training, seq_len=LENGTH, steps=2)
    folder = os.environ["EXPORTED"]
    keys = json.load(open(folder + "/torchtitan.json"))  # noqa: SIM115
    if "pipeline_parallel_schedule_csv" in keys["parallelism"]:
        keys["parallelism"]["pipeline_parallel_schedule_csv"] = folder + "/schedule.csv"
    config.parallelism = dataclasses.replace(config.parallelism, **keys["parallelism"])
    config.training = dataclasses.replace(config.training, **keys["training"])
    return config
