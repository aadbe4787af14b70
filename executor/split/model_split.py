"""Cutting the exported training step into stages that keep the model's parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor, fx

from executor.split.attention import Cores, core_marks, cores_of
from executor.split.in_place_writes import InPlaceWrites
from executor.split.member_step import MemberStep
from executor.split.piece_graph import Filled, HeldAttributes, PieceGraph
from executor.split.stage_module import BoundaryTensor, Piece, StageModule, memory_order
from planner.costs.placed_pipeline import StageSpec
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Stage
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharing import buffers_written, is_random

CPU = torch.device("cpu")


def cut(
    exported: ExportedStep,
    layers: LayerAssignment,
    plan: Plan,
    indices: Sequence[int],
    device: torch.device = CPU,
) -> list[StageModule]:
    """Cut out the stages with the given indices.

    A value made at or before a boundary and used after it crosses it; skips are handed on stage
    by stage, so that only neighbours talk. Static operations are computed wherever needed. Tensors
    that operations make are made on ``device``.

    Raises:
        PipeplanError: if something other than a tensor would cross a boundary, another stage
            would miss what an operation writes in place, or stages would draw random numbers in
            another order than the model. All stages are checked, so that all ranks raise it.
    """
    apart = {
        stage.index
        for stage in plan.stages
        if plan.job.shards_parameters and len(stage.devices) > 1
    }
    cutter = _Cutter(_planned_step(exported, layers, plan), plan.stages, device, apart=apart)
    return [cutter.stage(index) for index in indices]


def _planned_step(exported: ExportedStep, layers: LayerAssignment, plan: Plan) -> MemberStep:
    """Return the whole step as single devices run it by a plan."""
    takes_gradient = {t.name for t in plan.model.graph.boundaries if t.requires_grad}
    cores = cores_of(exported) if plan.job.recompute_attention else ()
    return _whole_step(exported, layers, takes_gradient, cores)


def _whole_step(
    exported: ExportedStep, layers: LayerAssignment, takes_gradient: Set[str], cores: Cores = ()
) -> MemberStep:
    places = {node: place for place, node in enumerate(exported.graph.nodes)}
    return MemberStep(exported, layers, frozenset(takes_gradient), places, {}, cores)


def cut_for_member(
    step: MemberStep,
    plan: Plan,
    indices: Sequence[int],
    shares: Filled,
    device: torch.device = CPU,
) -> list[StageModule]:
    """Cut out the stages of a member of a tensor-parallel group, as :func:`cut` does.

    Args:
        step: what members run.
        plan: its stages count.
        indices: of the stages.
        shares: gives the member's share of a parameter.
        device: of the tensors that operations make.

    Raises:
        PipeplanError: as of :func:`cut`.
    """
    cutter = _Cutter(step, plan.stages, device, shares)
    return [cutter.stage(index) for index in indices]


Messages = Sequence[Sequence[BoundaryTensor]]
"""What each stage but the last sends to the next."""


def messages_by_size(
    plan: Plan, exported: ExportedStep, layers: LayerAssignment, steps: Mapping[int, MemberStep]
) -> Mapping[int, Messages]:
    """Return what stages send, by the members of the tensor-parallel group that holds them.

    Args:
        plan: its stages count.
        exported: the whole step, as single devices run it.
        layers: of its operations.
        steps: of groups of several sizes, by these.

    Raises:
        PipeplanError: naming a stage that would hand on other tensors in groups of another size.
    """
    found = {}
    for size, step in {1: _planned_step(exported, layers, plan), **steps}.items():
        cutter = _Cutter(step, plan.stages, CPU)
        found[size] = [[cutter.boundary(node) for node in row] for row in cutter.crossing]
    for index in range(len(plan.stages) - 1):
        sent = [
            [(t.whole_shape(size), t.dtype, t.requires_grad, t.order) for t in rows[index]]
            for size, rows in found.items()
        ]
        shared = [[t.shared for t in rows[index]] for size, rows in found.items() if size > 1]
        if any(row != sent[0] for row in sent) or any(row != shared[0] for row in shared):
            raise PipeplanError(
                f"stages[{index}]: what it sends differs between groups of several sizes; plan "
                "again with tensor_parallel = N, groups of one size"
            )
    return found


def cut_layers(
    exported: ExportedStep,
    layers: LayerAssignment,
    names: Sequence[str],
    takes_gradient: Set[str],
    filled: Filled,
    device: torch.device = CPU,
) -> StageModule:
    """Cut out layers as a stage that receives what the first reads and sends what others read.

    Args:
        exported: the whole training step.
        layers: of its operations.
        names: of one layer, or of several that follow each other.
        takes_gradient: names of the tensors between layers that take one.
        filled: gives them parameters and buffers in place of the model's own, so that the
            model may be on the meta device.
        device: of the tensors that operations make.

    Raises:
        PipeplanError: if something other than a tensor would cross its boundaries.
    """
    place = layers.names.index(names[0])
    end = place + len(names)
    assert tuple(names) == tuple(layers.names[place:end])
    parts = (layers.names[:place], tuple(names), layers.names[end:])
    stages = [StageSpec(part, ()) for part in parts if part]
    cutter = _Cutter(_whole_step(exported, layers, takes_gradient), stages, device, filled)
    stage = cutter.stage(min(place, 1))
    piece = stage.pieces[0]
    sends = () if stage.is_last else piece.makes
    return replace(stage, receives=piece.reads, sends=sends, drawn_before=(), draws_after=False)


class _Cutter:
    """A step, its operations numbered by stage and by piece.

    Pieces are numbered through all stages: a stage is a run of them.
    """

    def __init__(
        self,
        step: MemberStep,
        stages: Sequence[Stage | StageSpec],
        device: torch.device,
        filled: Filled | None = None,
        apart: Set[int] = frozenset(),
    ) -> None:
        exported, layers = step.exported, step.layers
        self.device = device
        self.filled = filled
        self.exported = exported
        self.layers = layers
        self.stage_count = len(stages)
        output = next(n for n in exported.graph.nodes if n.op == "output")
        self.loss = output.all_input_nodes[0]
        self.takes_gradient = step.takes_gradient
        self.pieces = _pieces(stages, layers.names, apart)
        stage_of = {layer: index for index, stage in enumerate(stages) for layer in stage.layers}
        piece_of = {name: k for k, piece in enumerate(self.pieces) for name in piece.layers}
        self.node_stage = {n: stage_of[layer] for n, layer in layers.layer_of.items()}
        self.node_piece = {n: piece_of[layer] for n, layer in layers.layer_of.items()}
        self.shared = step.shared
        # Groups of all sizes send tensors in the order of the whole step.
        rows = _crossing(self.node_stage, self.stage_count)
        self.crossing = [sorted(row, key=step.place_of.__getitem__) for row in rows]
        between = _crossing(self.node_piece, len(self.pieces))
        self.written = InPlaceWrites(
            exported, self.node_piece, between, self.node_stage
        ).into_received()
        self.drawing = self._drawing()
        self.marks = core_marks(exported, layers, step.cores)

    def _drawing(self) -> list[fx.Node]:
        """Operations that draw random numbers; the stages draw one after the other as the model."""
        drawing = [node for node in self.node_stage if is_random(node)]
        for first, second in pairwise(drawing):
            before, after = self.node_stage[first], self.node_stage[second]
            if before > after:
                raise PipeplanError(
                    f"layer {self.layers.layer_of[first]!r} in stage {before} draws random numbers "
                    f"before layer {self.layers.layer_of[second]!r} in stage {after}, and would "
                    "draw them after it; put these layers in stages in the order of the model"
                )
        return drawing

    def stage(self, index: int) -> StageModule:
        """Build one stage."""
        is_last = index == self.stage_count - 1
        root = HeldAttributes(self.exported, self.filled)
        stages = [self.node_stage[node] for node in self.drawing]
        numbers = [k for k, piece in enumerate(self.pieces) if piece.stage == index]
        return StageModule(
            index=index,
            loss=self.boundary(self.loss) if is_last else None,
            pieces=tuple(self._piece(number, root) for number in numbers),
            receives=tuple(map(self.boundary, self.crossing[index - 1] if index else ())),
            sends=() if is_last else tuple(map(self.boundary, self.crossing[index])),
            model_inputs=tuple(str(n.target) for n in self._inputs(self.node_stage, index)),
            parameters=root.parameters,
            buffers=root.buffers,
            drawn_before=tuple(n for n in self.drawing if self.node_stage[n] < index),
            draws=index in stages,
            draws_after=any(drawing > index for drawing in stages),
        )

    def boundary(self, node: fx.Node) -> BoundaryTensor:
        """Return the description of a tensor that leaves its piece."""
        value = node.meta["val"]
        requires_grad = node is self.loss or node.name in self.takes_gradient
        order = memory_order(value)
        shape, shared = tuple(value.shape), self.shared.get(node)
        return BoundaryTensor(node.name, shape, value.dtype, requires_grad, order, shared)

    def _inputs(self, place_of: Mapping[fx.Node, int], place: int) -> list[fx.Node]:
        """The batch's entries that the operations of a stage or a piece read."""
        return [
            node
            for node in self.layers.inputs
            if any(place_of.get(user) == place for user in node.users)
        ]

    def _piece(self, number: int, root: HeldAttributes) -> Piece:
        nodes = [n for n, piece in self.node_piece.items() if piece == number]
        inside = set(nodes)
        reads = self._reads(nodes, number)
        inputs = self._inputs(self.node_piece, number)
        is_end = number == len(self.pieces) - 1
        leaving = [self.loss] if is_end else [n for n in nodes if _leaves(n, inside)]
        if self.pieces[number].recompute or self.pieces[number].is_apart:
            leaving += [n for n in reads if self._is_changed(n, number)]
        graph = PieceGraph(root, self.layers.static, [*reads, *inputs], self.device)
        return Piece(
            recompute=self.pieces[number].recompute,
            offload=self.pieces[number].offload,
            graph=graph.build(nodes, leaving, self.marks),
            reads=tuple(map(self.boundary, reads)),
            makes=tuple(map(self.boundary, leaving)),
            model_inputs=tuple(str(node.target) for node in inputs),
            written=self.written[number],
            written_buffers=frozenset(root.name_of(n) for _, n in buffers_written(nodes)),
            is_random=any(map(is_random, nodes)),
            last_reads=frozenset(n.name for n in reads if self._is_last_use(n, number)),
            layer=self.pieces[number].layers[0] if self.pieces[number].is_apart else None,
        )

    def _reads(self, nodes: Sequence[fx.Node], number: int) -> list[fx.Node]:
        """Values of earlier pieces, in graph order."""
        used = {value for node in nodes for value in node.all_input_nodes}
        return [n for n, piece in self.node_piece.items() if piece < number and n in used]

    def _is_changed(self, node: fx.Node, number: int) -> bool:
        """Return whether a piece writes into what it reads and later ones use that."""
        return node.name in self.written[number] and not self._is_last_use(node, number)

    def _is_last_use(self, node: fx.Node, number: int) -> bool:
        """Return whether no later piece uses it, of this stage or one it would be sent to."""
        return _last_use(node, self.node_piece, len(self.pieces)) <= number


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Return whether a tensor is used outside its piece; the caller uses the loss."""
    return isinstance(node.meta.get("val"), Tensor) and not inside.issuperset(node.users)


@dataclass(frozen=True)
class _PieceLayers:
    """The layers of a piece."""

    stage: int
    recompute: bool
    offload: bool
    layers: tuple[str, ...]
    is_apart: bool = False


def _pieces(
    stages: Sequence[Stage | StageSpec], names: Sequence[str], apart: Set[int]
) -> list[_PieceLayers]:
    """Each recomputed layer is a piece; of others, neighbours that all offload, or do not.

    Of stages that are ``apart`` every layer is one.
    """
    position = {name: place for place, name in enumerate(names)}
    found = []
    for index, stage in enumerate(stages):
        again = set(stage.recompute)
        # A number for each recomputed layer, -1 for those that offload, None for the others:
        # neighbours alike join.
        marks = {name: k for k, name in enumerate(stage.layers) if name in again}
        marks |= dict.fromkeys(stage.offload, -1)
        ordered = sorted(stage.layers, key=position.__getitem__)
        if index in apart:
            found += [_PieceLayers(index, n in again, False, (n,), is_apart=True) for n in ordered]
            continue
        for mark, run in groupby(ordered, key=marks.get):
            offloads = mark == -1
            again_ = mark is not None and not offloads
            found.append(_PieceLayers(index, again_, offloads, tuple(run)))
    return found


def _crossing(place_of: Mapping[fx.Node, int], count: int) -> list[list[fx.Node]]:
    """Values alive at the boundary after each place but the last, in graph order."""
    return [_alive_after(index, place_of, count) for index in range(count - 1)]


def _last_use(node: fx.Node, place_of: Mapping[fx.Node, int], count: int) -> int:
    """The last place that uses a value; the loss is handed out by the last of all."""
    places = [count - 1 if u.op == "output" else place_of.get(u, -1) for u in node.users]
    return max(places, default=-1)


def _alive_after(index: int, place_of: Mapping[fx.Node, int], count: int) -> list[fx.Node]:
    nodes = []
    for node, made in place_of.items():
        if made <= index < _last_use(node, place_of, count):
            if not isinstance(node.meta.get("val"), Tensor):
                raise PipeplanError(
                    f"{node.name} ({node.target}) is not a tensor and would leave its stage or "
                    "recomputed layer; move the boundary"
                )
            nodes.append(node)
    return nodes
