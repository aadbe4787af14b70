"""Cutting the exported training step into stages that keep the model's parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor, fx, nn

from executor.cutting.buffers import is_noted
from executor.cutting.stage_module import BoundaryTensor, Piece, StageModule, memory_order
from executor.cutting.writes import InPlaceWrites
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.tracing.export import ExportedStep
from planner.tracing.layers import LayerAssignment
from planner.tracing.sharing import is_random, written_by
from planner.tracing.torch_private import tree_map_only

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
    cutter = _Cutter(exported, layers, plan, device)
    return [cutter.stage(index) for index in indices]


class _Cutter:
    """The whole step, its operations numbered by stage and by piece.

    Pieces are numbered through all stages: a stage is a run of them.
    """

    def __init__(
        self, exported: ExportedStep, layers: LayerAssignment, plan: Plan, device: torch.device
    ) -> None:
        self.device = device
        self.exported = exported
        self.layers = layers
        self.stage_count = len(plan.stages)
        output = next(n for n in exported.graph.nodes if n.op == "output")
        self.loss = output.all_input_nodes[0]
        self.requires_grad = {t.name: t.requires_grad for t in plan.model.graph.boundaries}
        self.pieces = _pieces(plan, layers.names)
        stage_of = {layer: stage.index for stage in plan.stages for layer in stage.layers}
        piece_of = {name: k for k, piece in enumerate(self.pieces) for name in piece.layers}
        self.node_stage = {n: stage_of[layer] for n, layer in layers.layer_of.items()}
        self.node_piece = {n: piece_of[layer] for n, layer in layers.layer_of.items()}
        self.crossing = _crossing(self.node_stage, self.stage_count)
        between = _crossing(self.node_piece, len(self.pieces))
        self.written = InPlaceWrites(
            exported, self.node_piece, between, self.node_stage
        ).into_received()
        self.draws = self._draws()

    def _draws(self) -> frozenset[int]:
        """The stages that draw random numbers, one after the other as the model does."""
        drawing = [node for node in self.node_stage if is_random(node)]
        for first, second in pairwise(drawing):
            before, after = self.node_stage[first], self.node_stage[second]
            if before > after:
                raise PipeplanError(
                    f"layer {self.layers.layer_of[first]!r} in stage {before} draws random numbers "
                    f"before layer {self.layers.layer_of[second]!r} in stage {after}, and would "
                    "draw them after it; put these layers in stages in the order of the model"
                )
        return frozenset(self.node_stage[node] for node in drawing)

    def stage(self, index: int) -> StageModule:
        """Build one stage."""
        is_last = index == self.stage_count - 1
        root = _Attributes(self.exported)
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
            draws_before=any(drawing < index for drawing in self.draws),
            draws=index in self.draws,
            draws_after=any(drawing > index for drawing in self.draws),
        )

    def boundary(self, node: fx.Node) -> BoundaryTensor:
        """What there is to know of a tensor that leaves its piece."""
        value = node.meta["val"]
        requires_grad = node is self.loss or self.requires_grad.get(node.name, False)
        order = memory_order(value)
        return BoundaryTensor(node.name, tuple(value.shape), value.dtype, requires_grad, order)

    def _inputs(self, place_of: Mapping[fx.Node, int], place: int) -> list[fx.Node]:
        """The batch's entries that the operations of a stage or a piece read."""
        return [
            node
            for node in self.layers.inputs
            if any(place_of.get(user) == place for user in node.users)
        ]

    def _piece(self, number: int, root: _Attributes) -> Piece:
        nodes = [n for n, piece in self.node_piece.items() if piece == number]
        inside = set(nodes)
        reads = self._reads(nodes, number)
        inputs = self._inputs(self.node_piece, number)
        is_end = number == len(self.pieces) - 1
        leaving = [self.loss] if is_end else [n for n in nodes if _leaves(n, inside)]
        if self.pieces[number].recompute:
            leaving += [n for n in reads if self._is_changed(n, number)]
        graph = _PieceGraph(self, root, [*reads, *inputs])
        written = [value for node in nodes if not is_noted(node) for value in written_by(node)]
        return Piece(
            recompute=self.pieces[number].recompute,
            graph=graph.build(nodes, leaving),
            reads=tuple(map(self.boundary, reads)),
            makes=tuple(map(self.boundary, leaving)),
            model_inputs=tuple(str(node.target) for node in inputs),
            written=self.written[number],
            written_buffers=frozenset(root.name_of(n) for n in written if n.op == "get_attr"),
            is_random=any(map(is_random, nodes)),
            last_reads=frozenset(n.name for n in reads if self._is_last_use(n, number)),
        )

    def _reads(self, nodes: Sequence[fx.Node], number: int) -> list[fx.Node]:
        """Values of earlier pieces, in graph order."""
        used = {value for node in nodes for value in node.all_input_nodes}
        return [n for n, piece in self.node_piece.items() if piece < number and n in used]

    def _is_changed(self, node: fx.Node, number: int) -> bool:
        """Whether a piece writes into what it reads and later ones use that."""
        return node.name in self.written[number] and not self._is_last_use(node, number)

    def _is_last_use(self, node: fx.Node, number: int) -> bool:
        """Whether no later piece uses it, of this stage or of one that it would be handed on to."""
        return _last_use(node, self.node_piece, len(self.pieces)) <= number


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a tensor is used outside its piece, the loss by the caller."""
    return isinstance(node.meta.get("val"), Tensor) and not inside.issuperset(node.users)


@dataclass(frozen=True)
class _PieceLayers:
    """Which layers a piece is of."""

    stage: int
    recompute: bool
    layers: tuple[str, ...]


def _pieces(plan: Plan, names: Sequence[str]) -> list[_PieceLayers]:
    """Each recomputed layer is a piece of its own, what lies between them another."""
    position = {name: place for place, name in enumerate(names)}
    found = []
    for stage in plan.stages:
        again = set(stage.recompute)
        # A number for each recomputed layer, None for the others: neighbours alike join.
        marks = {name: k for k, name in enumerate(stage.layers) if name in again}
        ordered = sorted(stage.layers, key=position.__getitem__)
        for mark, run in groupby(ordered, key=marks.get):
            found.append(_PieceLayers(stage.index, mark is not None, tuple(run)))
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


class _Attributes:
    """The parameters and buffers of one stage, held under the model's own names."""

    def __init__(self, exported: ExportedStep) -> None:
        self.exported = exported
        self.module = nn.Module()
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}

    def name_of(self, node: fx.Node) -> str:
        """The model's own name (FQN) of a ``get_attr`` node."""
        target = str(node.target)
        return self.exported.names.get(target, target)

    def hold(self, node: fx.Node) -> str:
        """Hold the tensor of a ``get_attr`` node; its name in the stage."""
        value, name = self.exported.attribute(node), self.name_of(node)
        path, _, leaf = name.rpartition(".")
        owner = self._submodule(path)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(leaf, value)
            self.parameters[name] = value
        elif isinstance(value, Tensor):
            owner.register_buffer(leaf, value)
            self.buffers[name] = value
        else:
            setattr(owner, leaf, value)
        return name

    def _submodule(self, path: str) -> nn.Module:
        module = self.module
        for part in path.split(".") if path else []:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module


class _PieceGraph:
    """The new graph of one piece, built node by node."""

    def __init__(self, cutter: _Cutter, root: _Attributes, entering: Sequence[fx.Node]) -> None:
        self.cutter = cutter
        self.root = root
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        for node in entering:
            self.copies[node] = self.graph.placeholder(node.name)
            self.copies[node].meta = dict(node.meta)

    def build(self, nodes: Sequence[fx.Node], leaving: Sequence[fx.Node]) -> fx.GraphModule:
        """Copy the operations; the module returns the values ``leaving`` as a tuple."""
        for node in nodes:
            self.copies[node] = self._copy(node)
        self.graph.output(tuple(self._copy_of(node) for node in leaving))
        self.graph.lint()
        return fx.GraphModule(self.root.module, self.graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.graph.node_copy(node, self._copy_of)
        copy.args, copy.kwargs = tree_map_only(
            torch.device, lambda _: self.cutter.device, (copy.args, copy.kwargs)
        )
        return copy

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            if node.op == "get_attr":
                self.copies[node] = self.graph.get_attr(self.root.hold(node))
                self.copies[node].meta = dict(node.meta)
            elif node in self.cutter.layers.static:
                self.copies[node] = self._copy(node)
            else:
                raise AssertionError(f"{node} is used before it arrives")
        return self.copies[node]
