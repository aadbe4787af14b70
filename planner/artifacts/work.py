"""A layer's work by classes of operations: what the roofline needs to price each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from planner.artifacts.document import Count, Record

Phase = Literal["forward", "input_gradient", "weight_gradient"]
PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")
OperationClass = Literal["product", "convolution", "attention", "causal_attention", "memory"]
EfficiencyClass = Literal["product", "convolution", "attention", "memory"]
"""Classes that a device type has figures for; causal attention has those of attention."""


class Work(Record):
    """Equal operations of one phase of a layer, for one microbatch.

    Attributes:
        phase: of the layer.
        operation_class: which efficiency holds. Class ``memory`` is everything without products:
            such operations may stand in one row even where their traffic differs.
        operations: how many.
        flops: of all of them; a multiply-add counts as two, and causal attention counts as if
            nothing were masked, as published formulas do.
        traffic_bytes: what all of them read and write.
    """

    phase: Phase
    operation_class: OperationClass
    operations: Annotated[int, Field(ge=1, lt=2**63)]
    flops: Count
    traffic_bytes: Count


def totals(work: Sequence[Work], phase: Phase) -> tuple[int, int]:
    """FLOPs and bytes moved of a phase."""
    rows = [row for row in work if row.phase == phase]
    return sum(row.flops for row in rows), sum(row.traffic_bytes for row in rows)
