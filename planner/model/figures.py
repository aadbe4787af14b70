"""What layers do, whole or in part: FLOPs, traffic and collectives of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from planner.records.document import Count, Record, left_out

Phase = Literal["forward", "input_gradient", "weight_gradient"]
PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")
Name = Annotated[str, Field(min_length=1, max_length=400)]
OperationClass = Literal["product", "convolution", "attention", "causal_attention", "memory"]
EfficiencyClass = Literal["product", "convolution", "attention", "memory"]
"""Classes that a device type has figures for; causal attention uses those of attention."""


class Work(Record):
    """Equal operations of one phase of a layer, for one microbatch.

    Attributes:
        phase: Phase of the layer.
        operation_class: Class that selects the efficiency; ``memory`` is everything without matrix
            products, and its operations may share a row even with different traffic.
        operations: Number of operations.
        flops: FLOPs of all of them; a multiply-add counts as two, causal attention as if unmasked
            (as in published formulas).
        traffic_bytes: Bytes they read and write.
    """

    phase: Phase
    operation_class: OperationClass
    operations: Annotated[int, Field(ge=1, lt=2**63)]
    flops: Count
    traffic_bytes: Count


Size = Annotated[int, Field(ge=1)]


class Product(Record):
    """A matrix product of the forward: ``batch`` of [rows, inner] x [inner, columns].

    Attributes:
        operator: Name of the operator.
        batch: Number of products.
        rows: Rows of the left matrix.
        inner: Dimension that is summed over.
        columns: Columns of the right matrix.
        split: Which of these sizes each member has a share of; null: none.
    """

    operator: Name
    batch: Size
    rows: Size
    inner: Size
    columns: Size
    split: Literal["batch", "rows", "inner", "columns"] | None = None

    def of_share(self, degree: int) -> Product:
        """Return the product of one member of a group, whose split size is a share."""
        if self.split is None:
            return self
        share = max(1, getattr(self, self.split) // degree)
        return self.model_copy(update={self.split: share, "split": None})

    def flops(self) -> int:
        """Return its FLOPs; each of its two gradients has as many."""
        return 2 * self.batch * self.rows * self.inner * self.columns

    def result(self, phase: Phase) -> tuple[int, int]:
        """Return rows and columns of what is computed: the output, or a gradient of an operand."""
        sizes: dict[Phase, tuple[int, int]] = {
            "forward": (self.rows, self.columns),
            "input_gradient": (self.rows, self.inner),
            "weight_gradient": (self.inner, self.columns),
        }
        return sizes[phase]


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class Collective(Record):
    """A collective inside a tensor-parallel group that a layer waits for, once a microbatch.

    Attributes:
        kind: Kind of collective.
        phase: When: ``weight_gradient`` gathers again what the forward did not keep.
        tensor: Name of the tensor.
        bytes: Size of the whole tensor on one device: of what is reduced, of what an all-gather
            returns, of what a reduce-scatter takes, of what a device sends and keeps in an
            all-to-all.
    """

    kind: CollectiveKind
    phase: Phase
    tensor: Name
    bytes: Count


def totals(work: Sequence[Work], phase: Phase) -> tuple[int, int]:
    """Return the FLOPs and the traffic in bytes of a phase."""
    rows = [row for row in work if row.phase == phase]
    return sum(row.flops for row in rows), sum(row.traffic_bytes for row in rows)


class LayerFigures(Record):
    """FLOPs, traffic and stash of a layer, or of a part of it, for one microbatch.

    Attributes:
        name: Name of the layer.
        forward_flops: FLOPs of the forward; a multiply-add counts as two.
        input_gradient_flops: FLOPs of the gradient of its inputs.
        weight_gradient_flops: FLOPs of the gradient of its parameters.
        forward_traffic_bytes: Bytes read and written by the forward's operations.
        input_gradient_traffic_bytes: Bytes read and written by the operations of the input
            gradient.
        weight_gradient_traffic_bytes: Bytes read and written by the operations of the weight
            gradient.
        stash_bytes: Bytes that autograd keeps from forward to backward, without parameters.
    """

    name: Name
    forward_flops: Count
    input_gradient_flops: Count
    weight_gradient_flops: Count
    forward_traffic_bytes: Count
    input_gradient_traffic_bytes: Count
    weight_gradient_traffic_bytes: Count
    stash_bytes: Count

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward, nothing recomputed."""
        return self.forward_flops + self.input_gradient_flops + self.weight_gradient_flops


Seconds = Annotated[float, Field(ge=0, le=1e9)]


class MeasuredTimes(Record):
    """Measured times of one layer and one microbatch on one device type.

    Attributes:
        forward_s: Time of the forward.
        input_gradient_s: Time of the input gradient of a split backward.
        weight_gradient_s: Time of the weight gradient of a split backward.
        backward_s: Time of a whole backward; null: the sum of both gradients.
    """

    forward_s: Seconds
    input_gradient_s: Seconds
    weight_gradient_s: Seconds
    backward_s: Seconds | None = left_out(None)

    @property
    def whole_backward_s(self) -> float:
        """Seconds of a whole backward."""
        split_s = self.input_gradient_s + self.weight_gradient_s
        return split_s if self.backward_s is None else self.backward_s
