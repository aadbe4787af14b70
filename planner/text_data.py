"""Which batches the executor's own text can fill; planner and executor ask the same."""

from __future__ import annotations

from collections.abc import Mapping

from planner.artifacts.job import Job

KINDS_OF_BYTES = 256
TARGET = "target"
Forms = Mapping[str, tuple[str, tuple[int, ...]]]
"""The entries of a batch: dtype and shape, samples first."""


def token_input(forms: Forms) -> str | None:
    """The entry that text fills, next to the target; None where text does not fit."""
    names = [name for name in forms if name != TARGET]
    if len(names) != 1 or TARGET not in forms:
        return None
    dtype, shape = forms[names[0]]
    fits = dtype == "int64" and len(shape) == 2 and forms[TARGET][1] == shape
    return names[0] if fits else None


def text_problem(forms: Forms, job: Job) -> str | None:
    """Why text cannot fill such a batch, without a remedy; None where it can.

    Args:
        forms: of the batch.
        job: whose ``inputs`` may bound the tokens.
    """
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


def text_problem_of_inputs(job: Job) -> str | None:
    """The same of a job that lists its inputs; None where it lists none."""
    if not job.inputs:
        return None
    samples = job.samples_per_microbatch
    forms = {name: (spec.dtype, (samples, *spec.shape)) for name, spec in job.inputs.items()}
    return text_problem(forms, job)
