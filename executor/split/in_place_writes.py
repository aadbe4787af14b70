"""Operations that write in place: what a stage may write into, and cuts that would change it.

Which operations write buffers, and what a plan may do with the stages that hold them.

Running statistics and counters may be written in any order on any replica: they are noted and
applied in the order of microbatches (:mod:`executor.stage.statistics`). What else a forward writes
into a buffer depends on the microbatches before it, which have to run here and in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from executor.split.stage_module import StageModule
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.tracing.export import ExportedStep
from planner.tracing.sharing import memory_of, written_by


@dataclass(frozen=True)
class _Write:
    """An operation of a stage that writes into ``memory``."""

    node: fx.Node
    stage: int
    memory: int


class InPlaceWrites:
    """Checks that stages in turn read and write all memory as the whole model does.

    Args:
        exported: the whole training step.
        stage_of: stage of each operation that belongs to one. What runs apart within a stage
            counts as a stage of its own here.
        crossing: what crosses the boundary after each stage but the last.
        holder_of: which of the operations hold a buffer together: the plan's stages.
    """

    def __init__(
        self,
        exported: ExportedStep,
        stage_of: Mapping[fx.Node, int],
        crossing: Sequence[Sequence[fx.Node]],
        holder_of: Mapping[fx.Node, int],
    ) -> None:
        self.holder_of = holder_of
        self.exported = exported
        self.stage_of = stage_of
        self.crossing = crossing
        self.memory = memory_of(exported.graph)
        self.position = {node: place for place, node in enumerate(exported.graph.nodes)}
        self.users = self._by_memory(lambda node: node.all_input_nodes)
        self.writers = self._by_memory(written_by)

    def _by_memory(
        self, touched: Callable[[fx.Node], Iterable[fx.Node]]
    ) -> Mapping[int, Sequence[fx.Node]]:
        """The stages' operations by the memory of the values that ``touched`` names for them."""
        found: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.stage_of:
            for memory in {self.memory[n] for n in touched(node) if n in self.memory}:
                found[memory].append(node)
        return found

    def into_received(self) -> list[frozenset[str]]:
        """Return the received tensors that each stage's operations may write into.

        Raises:
            PipeplanError: if an operation in another stage would miss a write, or see it too soon.
        """
        names: list[set[str]] = [set() for _ in range(len(self.crossing) + 1)]
        for write in self._writes():
            received = [n for n in self._received(write.stage) if self._is_in(n, write.memory)]
            self._require_one_name(write, received)
            self._require_own_source(write)
            self._require_order(write)
            names[write.stage].update(node.name for node in received)
        return [frozenset(found) for found in names]

    def _writes(self) -> Iterator[_Write]:
        for memory, writers in self.writers.items():
            for node in writers:
                yield _Write(node, self.stage_of[node], memory)

    def _received(self, stage: int) -> Sequence[fx.Node]:
        return self.crossing[stage - 1] if stage else ()

    def _is_in(self, node: fx.Node, memory: int) -> bool:
        return self.memory.get(node) == memory

    def _sources(self, write: _Write) -> list[fx.Node]:
        """Inputs, parameters and buffers there, which every stage takes for itself."""
        kinds = ("placeholder", "get_attr")
        return [n for n in self.memory if n.op in kinds and self._is_in(n, write.memory)]

    def _require_one_name(self, write: _Write, received: Sequence[fx.Node]) -> None:
        """Refuse writes into tensors that enter under two names, as the other would miss them."""
        inputs = [node for node in self._sources(write) if node.op == "placeholder"]
        entering = [*received, *inputs]
        if len(entering) > 1:
            names = ", ".join(node.name for node in entering)
            raise self._refusal(write, f"what other stages read too ({names})")

    def _require_own_source(self, write: _Write) -> None:
        """Another stage has an input or a buffer of its own, and never sees the write.

        A buffer outlives the microbatch: not even other writes may be elsewhere.
        """
        for source in self._sources(write):
            is_buffer = source.op == "get_attr"
            writers = self.writers[write.memory] if is_buffer else ()
            place_of = self.holder_of if is_buffer else self.stage_of
            for node in (*source.users, *writers):
                stage = place_of.get(node, place_of[write.node])
                if stage != place_of[write.node]:
                    name = self.exported.names.get(str(source.target), source.name)
                    raise self._refusal(
                        write, f"{name}, of which stage {stage} has a copy of its own ({node.name})"
                    )

    def _require_order(self, write: _Write) -> None:
        """Stages run one after the other, whatever the order of the operations in the model."""
        for node in self.users[write.memory]:
            later = self.stage_of[node] - write.stage
            if later * (self.position[node] - self.position[write.node]) < 0:
                order = "before it in the model, but in a later stage"
                if later < 0:
                    order = "after it in the model, but in an earlier stage"
                raise self._refusal(write, f"what {node.name} ({node.target}) uses {order}")

    def _refusal(self, write: _Write, what: str) -> PipeplanError:
        return PipeplanError(
            f"{write.node.name} ({write.node.target}) in stage {write.stage} writes in place into "
            f"{what}; put these layers in one stage or compute it out of place in the model"
        )


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
