"""The ``manifest.json`` of a checkpoint: its shards and where each tensor lies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, JsonValue, model_validator

from planner.errors import shorten
from planner.records.document import Count, Record
from planner.records.formats import check_format

FORMAT = "pipeplan-checkpoint/1"
MANIFEST = "manifest.json"
LATEST = "latest"
NOTHING = "none"
"""In ``latest``: training began anew beside the checkpoints of an earlier run."""
STEP_FOLDER = re.compile(r"step-(\d{8,12})(?:\.(\d{1,6}))?")
"""A checkpoint's folder; a number after a dot where the same step was saved once more."""
SHARD = r"^rank-\d{5}\.safetensors$"

Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardRecord(Record):
    """One file of tensors."""

    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class TensorRecord(Record):
    """A tensor's place and form."""

    shard: Annotated[str, Field(pattern=SHARD)]
    dtype: Dtype
    shape: tuple[Count, ...]

    @property
    def form(self) -> str:
        """The form for messages, such as ``float32 [2, 3]``."""
        return f"{self.dtype} {list(self.shape)}"


class Manifest(Record):
    """A checkpoint's table of contents.

    Attributes:
        step: optimizer steps that were done.
        facts: what else training goes on with, plain JSON: seed, samples seen, digests.
        shards: by file name.
        tensors: by name: ``parameters/FQN``, ``buffers/FQN``, ``optimizer/FQN/STATE``,
            ``master/FQN``.
    """

    format: Literal["pipeplan-checkpoint/1"] = "pipeplan-checkpoint/1"
    step: Count
    facts: dict[str, JsonValue]
    shards: dict[Annotated[str, Field(pattern=SHARD)], ShardRecord]
    tensors: dict[Annotated[str, Field(min_length=1, max_length=4096)], TensorRecord]

    @model_validator(mode="after")
    def _shards_exist(self) -> Manifest:
        for name, tensor in self.tensors.items():
            if tensor.shard not in self.shards:
                raise ValueError(
                    f"tensors.{shorten(name)}.shard: {tensor.shard} is not one of the shards; "
                    "take another checkpoint"
                )
        return self

    @classmethod
    def parse(cls, data: Any, source: str = "manifest") -> Manifest:
        """Check the form of plain JSON data.

        Raises:
            PipeplanError: naming every wrong field, or a format this version does not read.
        """
        return super().parse(check_format(data, FORMAT, source), source)


def folder_name(step: int, again: int = 0) -> str:
    """The folder of a step's checkpoint; ``again`` counts how often it was saved before."""
    return f"step-{step:08d}" + (f".{again}" if again else "")


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def records_of(tensors: Mapping[str, torch.Tensor], shard: str) -> dict[str, TensorRecord]:
    """The manifest's entries of tensors that lie in one shard."""
    return {
        name: TensorRecord.model_validate(
            {"shard": shard, "dtype": NAMES[tensor.dtype], "shape": tuple(tensor.shape)}
        )
        for name, tensor in tensors.items()
    }
