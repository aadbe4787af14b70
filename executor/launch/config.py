"""The training file: how a plan is trained, as the user writes it down.

It names code to import (data, optimizer, schedule) and is trusted as a command line is. A plan is
not: what a plan names is imported only if the user named it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from executor.training.loss_scale import LossScalePolicy
from executor.training.optimisation import KINDS, Factor, custom_schedule, known_schedule
from planner.records.document import Record, read_toml
from planner.records.field_docs import known_or_own_schema
from planner.records.formats import check_format

FORMAT = "pipeplan-train/1"
Positive = Annotated[int, Field(ge=1, lt=2**63)]
NotNegative = Annotated[int, Field(ge=0, lt=2**63)]
Above = Annotated[float, Field(gt=0)]
Arguments = dict[str, JsonValue]
DATA = ("text", "random")


def _own_or(*known: str) -> AfterValidator:
    """Accepts the known words and ``module:name``."""

    def check(value: str) -> str:
        module, colon, name = value.partition(":")
        if value in known or (colon and module and name and ":" not in name):
            return value
        words = (
            "".join(f"{word!r}, " for word in known[:-1]) + f"{known[-1]!r} or " if known else ""
        )
        raise ValueError(f"expected {words}module:name of your own")

    return AfterValidator(check)


def _schema(*known: str) -> Any:
    """Return the same rule as a schema for editors."""
    return Field(json_schema_extra=known_or_own_schema(known))


class LearningRateTable(Record):
    """``[schedule]``: how the learning rate moves.

    Attributes:
        kind: ``constant``, ``linear`` or ``cosine`` after the warm-up, or ``module:function`` of
            your own that gives the factor of a step (from 1) and takes the place of all else here.
        warmup_steps: steps in which the rate rises along a line to its full value.
        final_factor: the last step's rate over the full one, from 0 to 1.
    """

    kind: Annotated[str, _own_or(*KINDS), _schema(*KINDS)] = "constant"
    warmup_steps: NotNegative = 0
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _own_takes_the_place(self) -> LearningRateTable:
        extra = self.model_fields_set - {"kind"}
        if self.kind not in KINDS and extra:
            raise ValueError(
                f"{', '.join(sorted(extra))} beside kind = {self.kind!r}, which gives the whole "
                "factor; remove them"
            )
        return self


class CheckpointTable(Record):
    """``[checkpoint]``: when and where checkpoints are written.

    Attributes:
        folder: of all checkpoints; made if missing; all hosts must share it.
        every: steps from one to the next; the last step always has one.
        keep: how many stay, default all.
        grace_s: on SIGTERM or Ctrl-C a checkpoint is written within this time; torchrun kills its
            ranks 30 s after SIGTERM (``--shutdown-timeout``).
    """

    folder: Annotated[str, Field(min_length=1)]
    every: Positive
    keep: Positive | None = None
    grace_s: Above = 20.0


class ValidationTable(Record):
    """``[validation]``: the mean loss on other data, in evaluation mode, while training goes on.

    Attributes:
        every: steps from one to the next; the last step always has one.
        data: as the training's; ``text`` and ``random`` draw other samples than it.
        data_arguments: keyword arguments of its factory.
        microbatches: of each; default as many as the data set fills, or as the plan has of data
            without a length.
    """

    every: Positive
    data: Annotated[str, _own_or(*DATA), _schema(*DATA)] | None = None
    data_arguments: Arguments = Field(default_factory=dict)
    microbatches: Positive | None = None


class TrainingConfig(Record):
    """A training file.

    Attributes:
        format: ``pipeplan-train/1``.
        steps: optimizer steps in all, those before a resumption included.
        seed: of weights, data order and dropout.
        data: ``text`` (bytes of Python's standard library), ``random`` (the example batch's
            shapes), or ``module:factory`` of a map-style or iterable data set of your own.
        data_arguments: keyword arguments of that factory.
        optimizer: ``module:factory`` of your own, called with (name, parameter) pairs; default the
            job's optimizer, whose memory the plan counts.
        optimizer_arguments: keyword arguments of the optimizer, such as ``weight_decay``.
        learning_rate: over the job's.
        loss_mean: ``microbatches``: the mean of the microbatches' losses; ``tokens``: the mean over
            all targets of the step but those of -100, of a loss that is their mean in a microbatch.
        schedule: how it moves; default not at all.
        clip_norm: the whole model's gradient is scaled down to this norm; default never.
        skip_non_finite: a step whose gradient holds NaN or inf is left out; default the training
            ends with that step, before a checkpoint is written.
        autocast: ``bfloat16`` runs the forwards of float32 weights under autocast.
        loss_scale: scales the loss of float16 weights; default the table's defaults for a job of
            float16, and none for others.
        checkpoint: default none are written.
        validation: default none.
        timeline: file for what really happened, as a Chrome trace; default none.
    """

    format: Literal["pipeplan-train/1"] = "pipeplan-train/1"
    steps: Positive = 20
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    data: Annotated[str, _own_or(*DATA), _schema(*DATA)] = "text"
    data_arguments: Arguments = Field(default_factory=dict)
    optimizer: Annotated[str, _own_or(), _schema()] | None = None
    optimizer_arguments: Arguments = Field(default_factory=dict)
    learning_rate: Above | None = None
    loss_mean: Literal["microbatches", "tokens"] = "microbatches"
    schedule: LearningRateTable = Field(default_factory=LearningRateTable)
    clip_norm: Above | None = None
    skip_non_finite: bool = False
    autocast: Literal["bfloat16"] | None = None
    loss_scale: LossScalePolicy | None = None
    checkpoint: CheckpointTable | None = None
    validation: ValidationTable | None = None
    timeline: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.data in DATA and self.data_arguments:
            raise ValueError(
                f"data_arguments: data = {self.data!r} takes none; remove them, or name "
                "module:factory of your own data set"
            )
        own_rate = self.optimizer is not None and self.learning_rate is None
        if "lr" in self.optimizer_arguments and not own_rate:
            raise ValueError("optimizer_arguments.lr: write it as learning_rate instead")
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps: {self.schedule.warmup_steps} of {self.steps} steps; "
                f"expected at most {self.steps}"
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> TrainingConfig:
        """Read a training file; nothing is imported yet.

        Raises:
            PipeplanError: naming every wrong field.
        """
        return cls.parse(check_format(read_toml(path), FORMAT, str(path)), str(path))

    def rate_factor(self) -> Factor:
        """The learning rate's factor as a function of the step; imports a schedule of one's own.

        Raises:
            PipeplanError: if that cannot be imported.
        """
        table = self.schedule
        kind = KINDS.get(table.kind)
        if kind is None:
            return custom_schedule(table.kind)
        return known_schedule(kind, self.steps, table.warmup_steps, table.final_factor)

    def schedule_facts(self, step: int) -> dict[str, JsonValue]:
        """Return what a checkpoint says of the schedule: its settings and the next step's factor.

        Args:
            step: that was done.
        """
        table = self.schedule
        facts: dict[str, JsonValue] = {"kind": table.kind}
        if table.kind in KINDS:
            facts["warmup_steps"] = table.warmup_steps
        if table.kind in KINDS and table.kind != "constant":
            facts |= {"final_factor": table.final_factor, "steps": self.steps}
        # A function of one's own may know no step after the last one.
        is_known = table.kind in KINDS or step < self.steps
        return {**facts, "next_factor": self.rate_factor()(step + 1) if is_known else None}
