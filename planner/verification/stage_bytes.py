"""What a stage of a plan holds and hands on, by the formulas of docs/memory.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.model.graph_record import Boundary, Layer, Parameter
from planner.plan.plan import Stage
from planner.verification.layer_costs import ProblemCosts, moved_bytes
from planner.verification.plan_layers import PlanLayers


@dataclass(frozen=True)
class CheckedStageBytes:
    """What a stage holds and hands on, for one microbatch; the names are those of docs/memory.md.

    Attributes:
        static: weights, gradients and optimizer state.
        workspace: while whole backwards run.
        split_workspace: while an input gradient runs apart.
        stash: from the forward until the backward, with what is received.
        weight_stash: from the input gradient until the weight gradient.
        received, sent: activations.
        gradient_sent, gradient_received: their gradients.
        message, gradient_message: bytes of messages onwards and back. Where microbatches have
            several lengths these are the mean, and all others of the longest.
        gathered, gradient_gathered: of these, what arrives in parts.
        offloaded: of the stash, what goes to the host between forward and backward.
    """

    static: int
    workspace: int
    split_workspace: int
    stash: int
    weight_stash: int
    received: int
    sent: int
    gradient_sent: int
    gradient_received: int
    message: int
    gradient_message: int
    gathered: int
    gradient_gathered: int
    offloaded: int


def stage_bytes(plan: PlanLayers, problem: ProblemCosts, stage: Stage) -> CheckedStageBytes:
    """Return what a stage holds and hands on.

    Args:
        plan: the layers of all stages.
        problem: sizes of single parameters.
        stage: which.
    """
    index, layers = stage.index, plan.layers(stage.index)
    received, sent = plan.crossing(index, index), plan.crossing(index + 1, index)
    # As many bytes are sent as the other side holds of them.
    onwards = plan.crossing(index + 1, min(index + 1, len(plan.graphs) - 1))
    back = plan.crossing(index, max(index - 1, 0))
    # What a layer that does not run again keeps of the received tensors is in its stash.
    besides = sum(t.bytes for t in received if plan.keeper(t) != index)
    workspace, split_workspace = _workspaces(plan, problem, index)
    return CheckedStageBytes(
        static=sum(
            problem.static_bytes(
                row, plan.sharers.get(row.name, 1), in_parts=row.name in plan.divided
            )
            for row in plan.held(layers)
        ),
        workspace=workspace,
        split_workspace=max(workspace, split_workspace),
        stash=_kept_bytes(plan, index) + besides,
        weight_stash=sum(map(_late_bytes, layers)) + besides,
        received=_sum(received),
        sent=_sum(sent),
        gradient_sent=_sum(_with_gradient(received)),
        gradient_received=_sum(_with_gradient(sent)),
        message=sum(map(moved_bytes, onwards)),
        gradient_message=sum(map(moved_bytes, _with_gradient(back))),
        gathered=sum(moved_bytes(t) for t in sent if t.parts > 1),
        gradient_gathered=sum(moved_bytes(t) for t in _with_gradient(received) if t.parts > 1),
        offloaded=_offloaded_bytes(plan, stage),
    )


def _sum(tensors: Iterable[Boundary]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _with_gradient(tensors: Iterable[Boundary]) -> list[Boundary]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _offloaded_bytes(plan: PlanLayers, stage: Stage) -> int:
    """Stashes of layers, less what others hold anyway until the backward.

    That is the batch, and tensors that the rest of the stage or the one before has too.
    """
    away, stage_of = set(stage.offload), plan.stage_of
    staying = 0
    for tensor in plan.graph.boundaries:
        holders = {tensor.producer, *tensor.users}
        stay = {name for name in holders - away if stage_of[name] == stage.index}
        if tensor.saved_by in away and (stay or stage_of[tensor.producer] < stage.index):
            staying += tensor.bytes
    rows = (row for row in plan.graph.layers if row.name in away)
    return max(0, sum(max(0, row.stash_bytes - row.batch_bytes) for row in rows) - staying)


def _kept_bytes(plan: PlanLayers, stage: int) -> int:
    """The stashes of layers, and tensors of the stage's own that layers start again from."""
    layers = plan.layers(stage)
    rerun = [row.name for row in layers if row.name in plan.rerun]
    again = {tensor.name: tensor for name in rerun for tensor in plan.used[name]}
    own = [
        tensor
        for tensor in again.values()
        if plan.stage_of[tensor.producer] == stage and plan.keeper(tensor) != stage
    ]
    return sum(row.stash_bytes for row in layers if row.name not in plan.rerun) + _sum(own)


def _workspaces(plan: PlanLayers, problem: ProblemCosts, stage: int) -> tuple[int, int]:
    """While whole backwards run, and while an input gradient runs apart.

    A layer's weights that are put together are whole while it runs, and its gradients too.
    """
    layers, in_parts = plan.layers(stage), plan.in_parts(stage)
    peaks = [
        peak_bytes(row, plan.made[row.name], plan.used[row.name], plan.held([row]))
        + sum(p.bytes + problem.gradient_bytes(p) for p in in_parts.get(row.name, ()))
        for row in layers
    ]
    kept = [
        _saved_bytes(plan, row) if row.name in plan.rerun else row.stash_bytes for row in layers
    ]
    late = [_late_bytes(layer) for layer in layers]
    # The weight gradients' needs are all there before the input gradient ends.
    whole, split = 0, sum(late) - sum(kept)
    for k, peak in enumerate(peaks):
        later = peak - sum(kept[k:])
        whole = max(whole, later)
        split = max(split, later + max(0, late[k] - kept[k]) + sum(late[k + 1 :]))
    return whole, split


def _saved_bytes(plan: PlanLayers, layer: Layer) -> int:
    """Return the inputs of a layer that are in its stash."""
    used = {tensor.name: tensor for tensor in plan.used[layer.name]}
    return _sum(tensor for tensor in used.values() if tensor.saved_by == layer.name)


def peak_bytes(
    layer: Layer,
    made: Sequence[Boundary],
    used: Sequence[Boundary],
    parameters: Iterable[Parameter],
) -> int:
    """Return the most that a layer holds while it runs.

    Args:
        layer: which.
        made: tensors that it makes.
        used: tensors that it uses.
        parameters: that it uses.
    """
    if layer.peak_bytes is not None:
        return layer.peak_bytes
    gradients = [row.bytes for row in parameters if row.trainable]
    passed = 2 * _sum(made) + _sum(_with_gradient(used))
    return layer.stash_bytes + layer.again_bytes + passed + max(gradients, default=0)


def _late_bytes(layer: Layer) -> int:
    """What the weight gradient needs once the input gradient is done."""
    return layer.stash_bytes if layer.weight_stash_bytes is None else layer.weight_stash_bytes
