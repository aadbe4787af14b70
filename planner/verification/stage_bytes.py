"""What a stage of a plan holds and hands on, by the formulas of docs/memory.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.model.graph_record import Layer
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


class StageSizes:
    """Bytes of a plan's stages.

    Args:
        layers: of the plan.
        problem: sizes of single parameters.
        seconds: of an operation of a stage, by its number, the operation's kind and the device.
    """

    def __init__(
        self, layers: PlanLayers, problem: ProblemCosts, seconds: Callable[[int, str, str], float]
    ) -> None:
        self._all, self._problem, self._seconds = layers, problem, seconds

    def of(self, stage: Stage) -> CheckedStageBytes:
        """Return what a stage holds and hands on."""
        index, layers = stage.index, self._all.layers(stage.index)
        received, sent = self._all.crossing(index, index), self._all.crossing(index + 1, index)
        # As many bytes are sent as the other side holds of them.
        onwards = self._all.crossing(index + 1, min(index + 1, len(self._all.graphs) - 1))
        back = self._all.crossing(index, max(index - 1, 0))
        # What a layer that does not run again keeps of the received tensors is in its stash.
        in_stash = sum(t.bytes for t in received if self._all.keeper(t) == index)
        input_bytes = sum(t.bytes for t in received)
        in_parts = {name: sum(both) for name, both in self.in_parts(index).items()}
        workspace, split_workspace = self._workspaces(layers, in_parts)
        return CheckedStageBytes(
            static=sum(
                self._problem.static_bytes(
                    row, self._all.sharers.get(row.name, 1), in_parts=row.name in self._all.divided
                )
                for row in self._all.held(layers)
            ),
            workspace=workspace,
            split_workspace=max(workspace, split_workspace),
            stash=self._kept_bytes(index, layers) + input_bytes - in_stash,
            weight_stash=sum(map(_late_bytes, layers)) + input_bytes - in_stash,
            received=input_bytes,
            sent=sum(t.bytes for t in sent),
            gradient_sent=sum(t.bytes for t in received if t.requires_grad),
            gradient_received=sum(t.bytes for t in sent if t.requires_grad),
            message=sum(map(moved_bytes, onwards)),
            gradient_message=sum(moved_bytes(t) for t in back if t.requires_grad),
            gathered=sum(moved_bytes(t) for t in sent if t.parts > 1),
            gradient_gathered=sum(
                moved_bytes(t) for t in received if t.requires_grad and t.parts > 1
            ),
            offloaded=self._offloaded_bytes(stage),
        )

    def in_parts(self, stage: int) -> dict[str, tuple[int, int]]:
        """Return the bytes of weights that each replica of a stage has a part of, and of gradients.

        Args:
            stage: its number.

        Returns:
            Both by layer.
        """
        return {
            layer: (sum(row.bytes for row in rows), sum(map(self._problem.gradient_bytes, rows)))
            for layer, rows in self._all.in_parts(stage).items()
        }

    def _kept_of(self, layer: Layer) -> int:
        is_again = layer.name in self._all.rerun
        return self._saved_input_bytes(layer) if is_again else layer.stash_bytes

    def _offloaded_bytes(self, stage: Stage) -> int:
        """Stashes of layers, less what others hold anyway until the backward.

        That is the batch, and tensors that the rest of the stage or the one before has too.
        """
        away, stage_of = set(stage.offload), self._all.stage_of
        staying = 0
        for tensor in self._all.graph.boundaries:
            holders = {tensor.producer, *tensor.users}
            stay = {name for name in holders - away if stage_of[name] == stage.index}
            if tensor.saved_by in away and (stay or stage_of[tensor.producer] < stage.index):
                staying += tensor.bytes
        rows = (row for row in self._all.graph.layers if row.name in away)
        kept = sum(max(0, row.stash_bytes - row.batch_bytes) for row in rows)
        return max(0, kept - staying)

    def _kept_bytes(self, stage: int, layers: Sequence[Layer]) -> int:
        """The stashes of layers, and tensors of the stage's own that layers start again from."""
        rerun = [row.name for row in layers if row.name in self._all.rerun]
        again = {tensor.name: tensor for name in rerun for tensor in self._all.used[name]}
        own = [
            tensor.bytes
            for tensor in again.values()
            if self._all.stage_of[tensor.producer] == stage and self._all.keeper(tensor) != stage
        ]
        return sum(row.stash_bytes for row in layers if row.name not in self._all.rerun) + sum(own)

    def _workspaces(self, layers: Sequence[Layer], in_parts: Mapping[str, int]) -> tuple[int, int]:
        """While whole backwards run, and while an input gradient runs apart.

        A layer's weights that are put together are whole while it runs, and its gradients too.
        """
        peaks = [self._peak_bytes(row) + in_parts.get(row.name, 0) for row in layers]
        kept = [self._kept_of(row) for row in layers]
        late = [_late_bytes(layer) for layer in layers]
        # The weight gradients' needs are all there before the input gradient ends.
        whole, split = 0, sum(late) - sum(kept)
        for k, peak in enumerate(peaks):
            later = peak - sum(kept[k:])
            whole = max(whole, later)
            split = max(split, later + max(0, late[k] - kept[k]) + sum(late[k + 1 :]))
        return whole, split

    def _saved_input_bytes(self, layer: Layer) -> int:
        used = {tensor.name: tensor for tensor in self._all.used[layer.name]}
        return sum(tensor.bytes for tensor in used.values() if tensor.saved_by == layer.name)

    def _peak_bytes(self, layer: Layer) -> int:
        if layer.peak_bytes is not None:
            return layer.peak_bytes
        made = sum(2 * tensor.bytes for tensor in self._all.made[layer.name])
        sent_back = sum(t.bytes for t in self._all.used[layer.name] if t.requires_grad)
        gradients = [row.bytes for row in self._all.held([layer]) if row.trainable]
        kept = layer.stash_bytes + layer.again_bytes
        return kept + made + sent_back + max(gradients, default=0)


def _late_bytes(layer: Layer) -> int:
    """What the weight gradient needs once the input gradient is done."""
    return layer.stash_bytes if layer.weight_stash_bytes is None else layer.weight_stash_bytes
