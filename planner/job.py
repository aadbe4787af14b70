"""The job file: batch size, precision, optimizer and loss of a training, for any cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    model_validator,
)

from planner.errors import PipeplanError, require_kind, shorten
from planner.lengths import Lengths, with_trace_file
from planner.records.document import MOST_ENTRIES, Count, Record, left_out, problem_lines
from planner.records.field_docs import known_or_own_schema
from planner.records.formats import read_formatted
from planner.rules import Rules
from planner.space import WITH_SHARDED_PARAMETERS, Space

FORMAT = "pipeplan-job/1"
Precision = Literal["float32", "float16", "bfloat16", "float64"]
Optimizer = Literal["adamw", "sgd_momentum", "sgd"]
GradientPrecision = Literal["float32", "weights"]
LOW_PRECISION = frozenset(("float16", "bfloat16"))
BYTES_OF = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by precision."""
MAX_MICROBATCHES = 65536
JsonValue = str | int | float | bool | None | list[str | int | float | bool | None]
LOSSES = ("cross_entropy", "mse", "output")
"""Built-in losses; any other name is the user's own ``module:function``."""
Samples = Annotated[int, Field(ge=1, le=2**20)]
ExpertLoad = Annotated[
    tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1, max_length=MOST_ENTRIES)
]


def _known_or_own(loss: str) -> str:
    module, _, function = loss.partition(":")
    if loss not in LOSSES and not (module and function and ":" not in function):
        raise ValueError("expected 'cross_entropy', 'mse', 'output' or module:function of your own")
    return loss


Runtime = Literal["pipeplan", "torch", "torchtitan", "megatron", "deepspeed"]
_BATCH = "the iteration's samples are samples_per_microbatch times microbatches: set these"
_SAMPLES, _MICROBATCHES = "it is called samples_per_microbatch", "it is called microbatches"
_GRADIENTS = "it is called gradient_precision"


class InputSpec(Record):
    """One model input, for a model that has no ``example_batch`` method.

    Attributes:
        shape: Shape of one sample, without the batch dimension.
        dtype: Data type of the elements.
        below: Upper limit (exclusive) of random integers, such as the vocabulary size.
    """

    shape: tuple[Count, ...]
    dtype: Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "bool"]
    below: Annotated[int, Field(ge=1, lt=2**63)] = 2


class Job(Space):
    """The settings of a training iteration, and the freedoms of its plans.

    Attributes:
        format: ``pipeplan-job/1``.
        name: Name of the job, for people.
        runtime: What will train: plans keep to what it can express, which narrows the freedoms
            (:mod:`planner.plan.runtimes`); null: ``pipeplan``, which runs every plan.
        samples_per_microbatch: Number of samples in a microbatch.
        microbatches: Microbatches per iteration; their gradients are summed before the optimizer
            step.
        microbatch_sizes: Numbers of samples of which a search chooses that of a microbatch, for as
            many samples an iteration; empty: samples_per_microbatch is the only one.
        precision: Data type of the weights; low precisions have float32 masters in the optimizer.
        gradient_precision: Data type in which gradients of 16-bit weights are summed, over
            microbatches and replicas: ``float32``, or ``weights``, that of the weights; null:
            float32, unless the runtime sums them in that of the weights.
        optimizer: Optimizer whose state counts in the plan's memory.
        learning_rate: Learning rate of the optimizer, unless a training file sets another.
        epoch_samples: Samples of the data set, for what an epoch takes and costs; null: not known.
        loss: ``cross_entropy`` and ``mse`` compare the output with ``target``, ``output`` uses the
            model's own output as the loss, ``module:function`` is your function, called with output
            and target.
        model_arguments: Keyword arguments of the model's factory.
        inputs: Shapes of a batch by argument of forward, and ``target``, for a model without
            ``example_batch``.
        lengths: Lengths of microbatches, where they are not all those of the model's own batch;
            null: they are. A file may name a ``trace_file`` there in place of ``trace``.
        recompute_attention: Whether every layer runs the core of its attention again in its
            backward, whose scores it does not keep (selective recomputation of Korthikanti et al.
            2022), whatever else is recomputed; the model is traced so.
        expert_parallel: Whether the devices of a tensor-parallel group have whole experts, instead
            of a share of each.
        expert_load: Relative number of tokens that each expert of a layer gets, in the order of the
            experts, or a list of such lists, one for each layer with experts: the device with the
            most decides how long a group takes. Null: equally many.
        rules: What plans must keep to beyond these freedoms (:mod:`planner.rules`).
    """

    NAMES_ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("global_batch_size", "batch_size", "mini_batch_size"), _BATCH),
        "train_batch_size": _BATCH,
        **dict.fromkeys(("micro_batch_size", "microbatch_size"), _SAMPLES),
        **dict.fromkeys(("gradient_accumulation_steps", "num_microbatches"), _MICROBATCHES),
        "dtype": "it is called precision",
        **dict.fromkeys(("accumulate_allreduce_grads_in_fp32", "grad_accum_dtype"), _GRADIENTS),
    }
    format: Literal["pipeplan-job/1"] = "pipeplan-job/1"
    name: str = "job"
    runtime: Runtime | None = None
    samples_per_microbatch: Samples = 1
    microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = 8
    microbatch_sizes: Annotated[tuple[Samples, ...], Field(max_length=16)] = left_out(())
    precision: Precision = "float32"
    gradient_precision: GradientPrecision | None = left_out(None)
    optimizer: Optimizer = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    epoch_samples: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    loss: Annotated[
        str, AfterValidator(_known_or_own), Field(json_schema_extra=known_or_own_schema(LOSSES))
    ] = "cross_entropy"
    model_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    inputs: dict[str, InputSpec] = Field(default_factory=dict)
    lengths: Lengths | None = left_out(None)
    recompute_attention: bool = left_out(False)
    expert_parallel: bool = left_out(False)
    expert_load: (
        ExpertLoad
        | Annotated[tuple[ExpertLoad, ...], Field(min_length=1, max_length=MOST_ENTRIES)]
        | None
    ) = left_out(None)
    rules: Rules = left_out(Rules())

    @model_validator(mode="after")
    def _sizes_divide_the_samples(self) -> Job:
        samples = self.samples_per_microbatch * self.microbatches
        for size in self.microbatch_sizes:
            if samples % size or samples // size > MAX_MICROBATCHES or self.lengths is not None:
                raise ValueError(
                    f"microbatch_sizes: {size} does not divide the {samples} samples of an "
                    f"iteration into at most {MAX_MICROBATCHES} microbatches, or they have several "
                    "lengths; choose other sizes, or none"
                )
        return self

    @model_validator(mode="after")
    def _groups_are_as_asked(self) -> Job:
        if self.rules.apart and self.tensor_parallel != 1:
            raise ValueError(
                "rules.apart names single devices, but tensor-parallel groups of devices hold the "
                "stages; set tensor_parallel = 1, or leave apart out"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel = true gives experts to the devices of a tensor-parallel group; "
                'set tensor_parallel to their number or "any"'
            )
        if self.expert_load is not None and not self.expert_parallel:
            raise ValueError(
                "expert_load says how many tokens whole experts get; set expert_parallel = true, "
                "or leave it out"
            )
        if not all(map(any, self.expert_loads)):
            raise ValueError(
                "expert_load: all numbers of a layer are 0; give at least one expert tokens"
            )
        return self

    def __new__(cls, *arguments: Any, **fields: Any) -> Self:
        """Raise a PipeplanError that names every wrong field, in the words of job files."""
        if arguments:
            what = f"Job({shorten(arguments[0])})"
            raise PipeplanError(f"{what}: name the fields, as in Job(microbatches=32), or Job.load")
        if fields:
            try:
                cls.model_validate(fields)
            except ValidationError as error:
                raise PipeplanError(problem_lines(error, cls.__name__, fields)) from None
        return super().__new__(cls)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file: TOML or JSON.

        Raises:
            PipeplanError: naming every wrong field.
        """
        require_kind(path, (str, Path), "path", "give the name of a job file")
        return cls.parse(with_trace_file(read_formatted(path, FORMAT), Path(path)), str(path))

    @property
    def expert_loads(self) -> tuple[tuple[float, ...], ...]:
        """The loads of experts: of one list those of all layers, of several one layer each."""
        load = self.expert_load or ()
        rows = tuple(row for row in load if isinstance(row, tuple))
        one = tuple(number for number in load if not isinstance(number, tuple))
        return (one,) if one else rows

    @property
    def space(self) -> Space:
        """The freedoms that a plan of this job may use."""
        # They were checked with the job; a search of one of several pipelines has others.
        return Space.model_construct(**{name: getattr(self, name) for name in Space.model_fields})

    @property
    def tokens_per_sample(self) -> float | None:
        """The length of a sample's sequence of tokens; None where ``inputs`` list none.

        In the mean, where microbatches have several lengths.
        """
        if self.lengths is not None:
            return self.lengths.mean_tokens
        lengths = [
            spec.shape[0]
            for spec in self.inputs.values()
            if len(spec.shape) == 1 and spec.dtype in ("int32", "int64")
        ]
        return lengths[0] if lengths else None

    @property
    def optimizer_bytes_per_element(self) -> int:
        """Bytes of optimizer state per parameter element.

        Low-precision weights have a float32 master copy next to the moments (Micikevicius et al.
        2018, "Mixed precision training").
        """
        moments = {"adamw": 2, "sgd": 0, "sgd_momentum": 1}[self.optimizer]
        masters = 1 if self.precision in LOW_PRECISION else 0
        return (moments + masters) * (8 if self.precision == "float64" else 4)


def job_with(job: Job, settings: Sequence[str]) -> Job:
    """Return a job with fields and model arguments that a command line sets.

    A name that is no field of a job is an argument of the model. A job whose replicas share
    parameters also gets the fields that this needs, unless they are set too.

    Args:
        job: the job to change.
        settings: ``NAME=VALUE`` each; the value is JSON, or text if it is not valid JSON.

    Raises:
        PipeplanError: for a wrong setting.
    """
    given = dict(map(_setting, settings))
    fields = {name: given.pop(name) for name in list(given) if name in Job.model_fields}
    if given:
        job = job.model_copy(update={"model_arguments": {**job.model_arguments, **given}})
    if not fields:
        return job
    if fields.get("shard_parameters"):
        fields = {**WITH_SHARDED_PARAMETERS, **fields}
    return Job.parse({**job.model_dump(mode="json"), **fields}, "--set")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise PipeplanError(f"--set {text}: expected NAME=VALUE, for example --set layers=12")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


WITHOUT_GROUPS: Mapping[str, Any] = {
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "expert_parallel": False,
    "expert_load": None,
}
"""Fields of the job of plans on single devices."""
KINDS_OF_BYTES = 256
TARGET = "target"
Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""The entries of a batch: dtype and shape, with samples as the first dimension."""


def token_input(forms: Forms) -> str | None:
    """Return the entry that text fills, next to the target; None if text does not fit."""
    names = [name for name in forms if name != TARGET]
    if len(names) != 1 or TARGET not in forms:
        return None
    dtype, shape = forms[names[0]]
    fits = dtype == "int64" and len(shape) == 2 and forms[TARGET][1] == shape
    return names[0] if fits else None


def text_problem(forms: Forms, job: Job) -> str | None:
    """Return the reason why text cannot fill such a batch for a job; None if it can."""
    tokens = token_input(forms)
    if tokens is None:
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, (_, shape) in forms.items())
        return (
            "--data text needs a model that reads one int64 input of shape [samples, tokens] and "
            f"has a target of the same shape; this one's batch is {shapes}"
        )
    for name in (tokens, TARGET):
        if name in job.inputs and job.inputs[name].below < KINDS_OF_BYTES:
            return (
                f"inputs.{name}.below: {job.inputs[name].below}, but --data text has "
                f"{KINDS_OF_BYTES} kinds of bytes"
            )
    return None
