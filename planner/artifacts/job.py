"""The job: how the model is to be trained, whatever the machines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from planner.artifacts.document import Count, Record, read_json, read_toml
from planner.artifacts.formats import check_format
from planner.errors import PipeplanError

FORMAT = "pipeplan-job/1"
Precision = Literal["float32", "float16", "bfloat16", "float64"]
LOW_PRECISION = frozenset(("float16", "bfloat16"))
MAX_MICROBATCHES = 65536
JsonValue = str | int | float | bool | None | list[str | int | float | bool | None]


LOSSES = ("cross_entropy", "mse", "output")
"""Losses that Pipeplan knows; any other is the user's own ``module:function``."""


def _known_or_own(loss: str) -> str:
    module, _, function = loss.partition(":")
    if loss not in LOSSES and not (module and function and ":" not in function):
        raise ValueError("expected 'cross_entropy', 'mse', 'output' or module:function of your own")
    return loss


class InputSpec(Record):
    """One model input: the shape of one sample; the microbatch is put in front.

    ``below`` bounds the integers drawn for an example (a vocabulary size, a class count).
    """

    shape: tuple[Count, ...]
    dtype: Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "bool"]
    below: Annotated[int, Field(ge=1, lt=2**63)] = 2


class Job(Record):
    """What one training iteration is.

    One iteration runs ``microbatches`` microbatches of ``samples_per_microbatch`` samples each.
    ``loss`` compares the model's output with the batch's ``target``: ``cross_entropy`` and ``mse``
    do that, ``output`` takes the model's own output as the loss, and ``module:function`` is a
    function of the user's, called with output and target. ``inputs`` describes a batch for a model
    that has no ``example_batch`` method. Plans may put up to ``max_stages_per_device``
    stages on a device, and recompute layers unless ``recompute`` forbids it.

    Weights are held in ``precision``, low ones with float32 masters in the optimizer.
    """

    format: Literal["pipeplan-job/1"] = "pipeplan-job/1"
    name: str = "job"
    samples_per_microbatch: Annotated[int, Field(ge=1, le=2**20)] = 1
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = 8
    precision: Precision = "float32"
    optimizer: Literal["adamw", "sgd", "sgd_momentum"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    loss: Annotated[str, AfterValidator(_known_or_own)] = "cross_entropy"
    max_stages: Annotated[int, Field(ge=1)] | None = None
    max_stages_per_device: Annotated[int, Field(ge=1, le=16)] = 1
    replication: bool = True
    recompute: bool = True
    model_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    inputs: dict[str, InputSpec] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "Job":
        """Read a job file: TOML as people write it, or JSON as ``pipeplan import`` does.

        Raises:
            PipeplanError: naming every wrong field.
        """
        source = str(path)
        data = read_json(path) if source.endswith(".json") else read_toml(path)
        return cls.parse(check_format(data, FORMAT, source), source)

    @property
    def optimizer_bytes_per_element(self) -> int:
        """Optimizer state of one parameter element.

        Low-precision weights keep a float32 master copy beside the moments (Micikevicius et al.
        2018, "Mixed precision training").
        """
        moments = {"adamw": 2, "sgd": 0, "sgd_momentum": 1}[self.optimizer]
        masters = 1 if self.precision in LOW_PRECISION else 0
        return (moments + masters) * (8 if self.precision == "float64" else 4)


def job_with(job: Job, settings: Sequence[str]) -> Job:
    """A job with model arguments of a command line over its own.

    Args:
        job: as it is.
        settings: ``NAME=VALUE`` each, the value as JSON, or as text if it is none.

    Raises:
        PipeplanError: for a wrong setting.
    """
    if not settings:
        return job
    arguments = {**job.model_arguments, **dict(map(_setting, settings))}
    return job.model_copy(update={"model_arguments": arguments})


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise PipeplanError(f"--set {text}: expected NAME=VALUE, for example --set layers=12")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
