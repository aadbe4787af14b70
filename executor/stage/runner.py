"""One stage on one rank: forwards and backwards of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from executor.distributed.member_group import TensorParallelGroup
from executor.runtime.worker import TensorSpec
from executor.split.member_step import GROUP
from executor.split.stage_module import Piece, StageModule
from executor.stage.attention import recompute_cores
from executor.stage.deferred import defer_weight_gradients
from executor.stage.divided import Divided, LayerWeights
from executor.stage.offload import StashOffload
from executor.stage.random_numbers import (
    RandomState,
    drawn_offset,
    seed_generator,
    state_bytes,
)
from executor.stage.recompute import BeforeUse, Recomputed, Run, differentiate, put_gates
from executor.stage.statistics import Statistics, note_statistics
from executor.stage.weight_gradients import (
    Added,
    Queue,
    ignore,
    take_all,
)

CPU = torch.device("cpu")


@dataclass
class _InFlight:
    """The state that a microbatch keeps between forward and backward.

    Attributes:
        leaves: received tensors that take a gradient.
        roots: where the backward starts, in the order of the gradients it is given. Edges of the
            autograd graph do not hold the outputs: these are free once they have been sent.
        loss: of the last stage, detached.
    """

    leaves: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]
    loss: Tensor | None


class StageRunner:
    """Runs one stage, holding what autograd needs between forward and backward.

    Gradients accumulate in the parameters' ``grad``: the mean over ``microbatches``, times
    the loss scale.

    Attributes:
        statistics: what the iteration's microbatches observed; None where the stage has no running
            statistics or counters.
        receives_random_state: whether the stage before sends its own with a microbatch.
        graphs: of the stage's pieces, as forwards run them.

    Args:
        stage: cut out of the model.
        microbatches: of one iteration, over all replicas.
        split: the microbatches whose backward is split into input and weight gradients here.
        device: of tensors.
        autocast: what torch's autocast lowers operations to in the forward; None: as they are.
        before_use: called before a forward uses parameters; None: no one waits for them.
        added: called with each parameter whose gradient something other than autograd has added to.
        group: the tensor-parallel group of this rank, if the stage is a member's.
        offloaded: the microbatches whose stashes of offloaded layers travel to the host.
        divided: weights of the layers that replicas divide, by layer.
    """

    def __init__(
        self,
        stage: StageModule,
        microbatches: int,
        split: Collection[int] = (),
        device: torch.device = CPU,
        autocast: torch.dtype | None = None,
        before_use: BeforeUse | None = None,
        added: Added = ignore,
        group: TensorParallelGroup | None = None,
        offloaded: Collection[int] = (),
        divided: Mapping[str, LayerWeights] | None = None,
    ) -> None:
        self.stage = stage
        self._divided = divided or {}
        self.microbatches = microbatches
        self.split = frozenset(split)
        self.offloaded = frozenset(offloaded)
        self.device = device
        self.autocast = autocast
        self._outputs = stage.outputs
        written = {name for piece in stage.pieces for name in piece.written_buffers}
        self._written = [stage.buffers[name] for name in sorted(written)]
        self._received_orders = [boundary.received_order for boundary in stage.receives]
        # A GPU's generator is a counter: each stage can tell where its own numbers begin.
        counts = device.type == "cuda"
        self._offset = drawn_offset(stage.drawn_before, device) if counts and stage.draws else 0
        self.receives_random_state = stage.receives_random_state and not counts
        self._sends_random_state = stage.sends_random_state and not counts
        self._loss_scale = 1.0
        self._weights: Mapping[int, Tensor] = {}
        self._added = added
        statistics = Statistics(microbatches, stage.buffers)
        self._offload = StashOffload(
            device,
            lambda: (*stage.parameters.values(), *stage.buffers.values(), *statistics.tables),
        )
        self._queue: Queue = []
        self._in_flight: dict[int, _InFlight] = {}
        self._left: dict[int, Queue] = {}
        graphs = [note_statistics(piece.graph, statistics) for piece in stage.pieces]
        for graph in graphs if group is not None else ():
            setattr(graph, GROUP, group)
        self._group = group if group is not None and any(map(_gathers, graphs)) else None
        if before_use is not None:
            for graph in graphs:
                put_gates(graph, stage.parameters, before_use)
        self.statistics = None if statistics.is_empty else statistics
        self.graphs = tuple(graphs)
        deferred = [defer_weight_gradients(g, self._queue) for g in graphs if self.split]
        for graph in (*graphs, *deferred):
            recompute_cores(graph, self._core_again)
        self._whole_runs = list(map(self._run, stage.pieces, graphs, graphs))
        self._split_runs = self._whole_runs
        if self.split:
            self._split_runs = list(map(self._run, stage.pieces, graphs, deferred))

    def begin(self, loss_scale: float, weights: Mapping[int, Tensor] | None = None) -> None:
        """Begin an iteration.

        Args:
            loss_scale: its loss is multiplied by this.
            weights: of the microbatches' losses; None: equal ones.
        """
        self._loss_scale = loss_scale
        self._weights = weights or {}

    def _run(self, piece: Piece, first: fx.GraphModule, again: fx.GraphModule) -> Run:
        if not self._copies_itself(piece):
            return again
        differentiable = [tensor.requires_grad for tensor in piece.makes]
        written = [t.name in piece.written for t in piece.reads]
        written += [False for _ in piece.model_inputs]
        run: Run = again
        if piece.recompute:
            # What the weight gradients of a split backward need, they keep whole.
            context = self._keeping_shares if first is again else self._context
            run = self._again(first, again, written, differentiable, piece.is_random, context)
            written = [False for _ in written]  # It copies what it writes into.
        weights = self._weights_of(piece)
        return run if weights is None else Divided(run, weights, written, differentiable)

    def _weights_of(self, piece: Piece) -> LayerWeights | None:
        """Return the weights of a piece that replicas divide; None if it has none."""
        return None if piece.layer is None else self._divided.get(piece.layer)

    def _copies_itself(self, piece: Piece) -> bool:
        """Return whether the run of a piece copies what it writes into."""
        return piece.recompute or self._weights_of(piece) is not None

    def _again(
        self,
        first: fx.GraphModule,
        again: fx.GraphModule,
        written: Sequence[bool],
        differentiable: Sequence[bool],
        is_random: bool,
        context: Callable[[RandomState | None], AbstractContextManager[None]],
    ) -> Run:
        """Return a run that keeps its inputs alone, and runs again in the backward."""
        rest = is_random, self.statistics, context, self.device
        return Recomputed(first, again, written, differentiable, *rest)

    def _core_again(
        self, core: fx.GraphModule, differentiable: Sequence[bool], is_random: bool
    ) -> Run:
        written = [False for node in core.graph.nodes if node.op == "placeholder"]
        return self._again(core, core, written, differentiable, is_random, self._context)

    @contextmanager
    def _keeping_shares(self, state: RandomState | None = None) -> Iterator[None]:
        """As :meth:`_context`, keeping shares of what a tensor-parallel group gathers."""
        kept = nullcontext() if self._group is None else self._group.keeping_shares()
        with self._context(state), kept:
            yield

    @contextmanager
    def _context(self, state: RandomState | None = None) -> Iterator[None]:
        """Set the random state and autocast for a run, the first one or a recomputation."""
        # Autocast's cache would hand casts made without a graph to operations that need one.
        kind, dtype = self.device.type, self.autocast
        with (
            RandomState.borrowed(state),
            torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False),
        ):
            yield

    def forward(
        self,
        microbatch: int,
        received: Sequence[Tensor],
        batch: Mapping[str, Tensor],
        seed: int = 0,
    ) -> tuple[Tensor, ...]:
        """Run the stage.

        Args:
            microbatch: its number.
            received: what the stage before sent, on a CPU the random state last if it sends one.
            batch: the entries the stage reads, by name.
            seed: of the microbatch's random numbers, where no stage sends their state.

        Returns:
            Detached tensors for the next stage, as ``BoundaryTensor.sent`` gives them, and the
            random state if that needs it, or the detached scalar loss.
        """
        tensors = list(received)
        if self.receives_random_state:
            RandomState(self.device, tensors.pop()).restore()
        elif self.stage.draws:
            seed_generator(self.device, seed, self._offset)
        is_split = microbatch in self.split
        with self._context() if is_split else self._keeping_shares():
            outputs = self._forward(microbatch, tensors, batch)
        if self._sends_random_state:
            outputs = (*outputs, RandomState.now(self.device).state)
        return outputs

    def _forward(
        self, microbatch: int, received: Sequence[Tensor], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        stage = self.stage
        if self.statistics is not None:
            self.statistics.begin(microbatch)
        leaves = [
            tensor.detach().permute(order).requires_grad_(boundary.requires_grad)
            for tensor, order, boundary in zip(
                received, self._received_orders, stage.receives, strict=True
            )
        ]
        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_hook(_of_its_own)  # type: ignore[no-untyped-call]
        values = dict(zip((t.name for t in stage.receives), leaves, strict=True))
        kept = {tensor.name for tensor in self._outputs}
        runs = self._split_runs if microbatch in self.split else self._whole_runs
        travels = microbatch in self.offloaded
        if travels:
            # The gradients of what was received, and batches, are held in any case.
            self._offload.stay((*leaves, *batch.values()))
        for piece, run in zip(stage.pieces, runs, strict=True):
            inputs = _entering(piece, values, () if self._copies_itself(piece) else piece.written)
            with self._offload.saving() if travels and piece.offload else nullcontext():
                made = run(*inputs, *(batch[name] for name in piece.model_inputs))
            if travels and not piece.offload:
                self._offload.stay((*inputs, *made))
            for name in piece.last_reads - kept:
                del values[name]
            values.update(zip((t.name for t in piece.makes), made, strict=True))
        outputs = tuple(values[tensor.name] for tensor in self._outputs)
        # Autocast on another kind of device may keep a type that the export did not expect.
        outputs = tuple(x.to(t.dtype) for x, t in zip(outputs, self._outputs, strict=True))
        if self._written:
            outputs = tuple(_copied_if_in(self._written, x) for x in outputs)
        detached = tuple(
            x.detach().permute(t.order) for x, t in zip(outputs, self._outputs, strict=True)
        )
        self._in_flight[microbatch] = _InFlight(
            leaves=tuple(leaf for leaf in leaves if leaf.requires_grad),
            roots=self._roots(outputs),
            loss=detached[0] if stage.is_last else None,
        )
        if travels:
            self._offload.leave(microbatch)
        return detached

    def _roots(self, outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
        return tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, boundary in zip(outputs, self._outputs, strict=True)
            if boundary.requires_grad
        )

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the whole backward, or the input gradients alone of a microbatch that is split.

        Args:
            microbatch: whose forward has run.
            gradients: of the sent tensors that require one, in order; none for the last stage.

        Returns:
            Gradients of the received tensors that require one, in order. Zeros if none came this
            way: boundaries require one only if the loss reaches them
            (:func:`planner.tracing.gradients.nodes_with_gradient`), here or on another way,
            so that no parameter gets a gradient that plain torch would leave None.
        """
        self.bring_back(microbatch)
        kept = self._in_flight.pop(microbatch)
        if kept.loss is not None:
            weight = self._weights.get(microbatch)
            gradient = torch.full_like(kept.loss, self._loss_scale / self.microbatches)
            if weight is not None:
                gradient = (self._loss_scale * weight).nan_to_num().to(kept.loss).view_as(kept.loss)
            gradients = [gradient]
        differentiate(kept.roots, gradients)
        if self._group is not None:
            self._group.end_backward()
        if microbatch in self.split:
            self._left[microbatch] = self._queue.copy()
            self._queue.clear()
        return tuple(
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in kept.leaves
        )

    def forget(self, microbatch: int) -> None:
        """Let go of a microbatch that will have no backward."""
        del self._in_flight[microbatch]

    def incoming(self) -> list[TensorSpec]:
        """Return the tensors that the previous stage sends for a microbatch."""
        found = [TensorSpec(t.sent_shape, t.dtype) for t in self.stage.receives]
        if self.receives_random_state:
            found.append(TensorSpec((state_bytes(self.device),), torch.uint8))
        return found

    def returning(self) -> list[TensorSpec]:
        """Return the gradients that the next stage sends back for a microbatch."""
        return [TensorSpec(t.shape, t.dtype) for t in self.stage.gradients_in]

    def bring_back(self, microbatch: int) -> None:
        """Begin to bring the stash of a microbatch back from the host, if it is there."""
        self._offload.bring_back(microbatch)

    def weight_gradients(self, microbatch: int) -> None:
        """Run the weight gradients of a split backward."""
        take_all(self._left.pop(microbatch), self._added)

    def require_empty(self) -> None:
        """Check that every forward of the iteration has had its whole backward."""
        assert not self._in_flight, f"microbatches left in flight: {sorted(self._in_flight)}"
        assert not self._left, f"weight gradients left to do: {sorted(self._left)}"


def _gathers(graph: fx.GraphModule) -> bool:
    """Return whether a tensor-parallel group joins shares of positions in it."""
    return any(node.op == "call_method" and node.target == "gather" for node in graph.graph.nodes)


def _copied_if_in(buffers: Sequence[Tensor], output: Tensor) -> Tensor:
    """Return a copy of an output that lies in a buffer, which the next microbatch may write into.

    The next stage reads it later, or it is still being sent then.
    """
    held = output.untyped_storage().data_ptr()
    is_inside = any(held == buffer.untyped_storage().data_ptr() for buffer in buffers)
    return output.clone() if is_inside else output


def _of_its_own(gradient: Tensor) -> Tensor | None:
    """Return a copy of a gradient that is part of a larger tensor, else None.

    The whole gradient of a concatenation, say, would be held until this part of it is sent.
    """
    held_bytes = gradient.untyped_storage().nbytes()
    is_part = held_bytes > gradient.numel() * gradient.element_size()
    return gradient.clone() if is_part else None


def _entering(piece: Piece, values: dict[str, Tensor], copied: Iterable[str]) -> list[Tensor]:
    """Return the tensors that a piece reads.

    Autograd forbids writing into a leaf, and a local neighbour may still hold the tensor: what is
    written is a copy, from here on. A recomputed piece, or one whose weights are put together,
    makes its own, and returns what it wrote.

    Args:
        piece: of the stage.
        values: that are there, by name.
        copied: those that the piece writes into and does not copy itself.
    """
    for name in copied:
        values[name] = values[name].clone()
    return [values[tensor.name] for tensor in piece.reads]
