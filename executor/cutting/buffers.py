"""Which operations write buffers, and what a plan may do with the stages that hold them.

Running statistics and counters may be written in any order on any replica: they are noted and
applied in the order of microbatches (:mod:`executor.stage.statistics`). What else a forward writes
into a buffer depends on the microbatches before it, which have to run here and in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from executor.cutting.stage_module import StageModule
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.tracing.sharing import written_by
from planner.tracing.torch_private import OpOverload, schema_name

_NORMALISATIONS = frozenset(("aten::batch_norm", "aten::instance_norm"))


def is_noted(node: fx.Node) -> bool:
    """Whether what it writes may be noted and applied later."""
    return is_noted_normalisation(node) or is_counter(node)


def is_noted_normalisation(node: fx.Node) -> bool:
    """A normalisation that writes running statistics, which are buffers of the model."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if schema_name(node.target) not in _NORMALISATIONS:
        return False
    written = written_by(node)
    return bool(written) and all(n.op == "get_attr" for n in written)


def is_counter(node: fx.Node) -> bool:
    """``buffer.add_(1)`` of an integer buffer whose value nothing else uses."""
    if not _adds_number(node):
        return False
    buffer = node.args[0]
    assert isinstance(buffer, fx.Node)
    value = buffer.meta.get("val")
    if buffer.op != "get_attr" or not isinstance(value, Tensor) or value.is_floating_point():
        return False
    return all(_adds_number(user) for user in buffer.users)


def _adds_number(node: fx.Node) -> bool:
    is_add = node.target is torch.ops.aten.add_.Tensor and len(node.args) == 2
    return is_add and isinstance(node.args[1], int) and not node.users


def require_order(plan: Plan, stages: tuple[StageModule, ...]) -> None:
    """Refuse plans under which a buffer would not have the value of a single process.

    Raises:
        PipeplanError: naming the buffers, the stage and the remedy.
    """
    problems = [problem for stage in stages for problem in _problems(plan, stage)]
    if problems:
        raise PipeplanError(problems)


def _problems(plan: Plan, stage: StageModule) -> Iterator[str]:
    written = {name for piece in stage.pieces for name in piece.written_buffers}
    if not written:
        return
    what = f"stages[{stage.index}]: its forwards write {', '.join(sorted(written))}, which"
    if len(plan.stages[stage.index].devices) > 1:
        yield f"{what} replicas would each write for themselves; give it a single device"
    for device, order in plan.parsed_orders().items():
        forwards = [op.microbatch for op in order if op[:2] == (stage.index, "F")]
        if forwards != sorted(forwards):
            yield (
                f"{what} depends on the order of microbatches; let orders[{device!r}] run its "
                "forwards in their order"
            )
    for piece in stage.pieces:
        read = {str(node.target) for node in piece.graph.graph.nodes if node.op == "get_attr"}
        if piece.recompute and read & written:
            yield f"{what} recomputed layers would read changed; take them out of recompute"
