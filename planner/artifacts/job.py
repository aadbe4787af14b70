"""The job: how the model is to be trained, whatever the machines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from planner.artifacts.document import Count, Record, read_json, read_toml
from planner.artifacts.formats import check_format
from planner.artifacts.own_names import known_or_own_schema
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
    """One model input, for a model that has no ``example_batch`` method.

    Attributes:
        shape: of one sample; the microbatch is put in front.
        dtype: of its elements.
        below: bounds the integers drawn for an example (a vocabulary size, a class count).
    """

    shape: tuple[Count, ...]
    dtype: Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "bool"]
    below: Annotated[int, Field(ge=1, lt=2**63)] = 2


class Job(Record):
    """What one training iteration is.

    Attributes:
        format: ``pipeplan-job/1``.
        name: for people.
        samples_per_microbatch: the samples of a microbatch.
        microbatches: of one iteration; their gradients are summed before the optimizer step.
        precision: in which weights are held; low ones have float32 masters in the optimizer.
        optimizer: whose state the plan counts.
        learning_rate: of the optimizer, unless a training file says another.
        loss: compares the model's output with the batch's ``target``: ``cross_entropy`` and
            ``mse`` do that, ``output`` takes the model's own output as the loss, and
            ``module:function`` is a function of your own, called with output and target.
        max_stages: a plan has at most so many; null: any number.
        max_stages_per_device: a plan puts at most so many on a device; 2 and more allow
            interleaved plans.
        replication: whether a stage may have several devices.
        recompute: whether a layer's forward may run again in its backward, to save memory.
        model_arguments: keyword arguments of the model's factory.
        inputs: the shapes of a batch by argument of forward, and ``target``, for a model that has
            no ``example_batch`` method.
    """

    format: Literal["pipeplan-job/1"] = "pipeplan-job/1"
    name: str = "job"
    samples_per_microbatch: Annotated[int, Field(ge=1, le=2**20)] = 1
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = 8
    precision: Precision = "float32"
    optimizer: Literal["adamw", "sgd", "sgd_momentum"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    loss: Annotated[
        str, AfterValidator(_known_or_own), Field(json_schema_extra=known_or_own_schema(LOSSES))
    ] = "cross_entropy"
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
