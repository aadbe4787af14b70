"""How Megatron-LM's arguments deal out blocks to stages, and the order in which ranks run them.

Meanings are those of megatron-core 0.16.1: ``TransformerConfig.__post_init__``,
``get_num_layers_to_build`` of ``transformer_block.py``, and ``schedules.py`` in
``pipeline_parallel``; of arguments, ``validate_args`` in Megatron-LM's
``megatron/training/arguments.py``. What these refuse is refused here.
"""

from __future__ import annotations

from planner.errors import PipeplanError
from planner.interop.adopt.division import Division, divide
from planner.interop.adopt.megatron_arguments import MegatronArguments
from planner.interop.importing.megatron_layout import parse_layout
from planner.interop.importing.schedule_csv import ScheduleTable
from planner.model.blocks import block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import in_turn
from planner.units import plural

_LAYOUT = "pipeline-model-parallel-layout"
_EACH = "num-layers-per-virtual-pipeline-stage"
_CHUNKS = "num-virtual-stages-per-pipeline-rank"
_FIRST, _LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_EMBEDDING = "account-for-embedding-in-pipeline-split"
_LOSS = "account-for-loss-in-pipeline-split"
_TURN = "microbatch-group-size-per-virtual-pipeline-stage"
_EXCLUDING = ((_LAYOUT, _EACH, _CHUNKS), (_LAYOUT, _FIRST, _EMBEDDING), (_LAYOUT, _FIRST, _LOSS),
              (_LAYOUT, _LAST, _EMBEDDING), (_LAYOUT, _LAST, _LOSS), (_EACH, _FIRST),
              (_EACH, _LAST))  # fmt: skip
"""Arguments of which Megatron-LM takes one alone."""
_BLOCKS, _AHEAD = "num-layers", "mtp-num-layers"
_NUMBERS = (_BLOCKS, _EACH, _CHUNKS, _FIRST, _LAST, _TURN)
STAGE_ARGUMENTS = (_LAYOUT, _EACH, _CHUNKS, _FIRST, _LAST, _EMBEDDING, _LOSS, _AHEAD)
"""Arguments that deal out blocks."""


class MegatronStages:
    """How blocks are dealt out to stages.

    Args:
        found: the arguments, which note what Megatron-LM refuses.
        size: pipeline ranks.
    """

    def __init__(self, found: MegatronArguments, size: int) -> None:
        for names in _EXCLUDING:
            given = [name for name in names if found.has(name)]
            if len(given) > 1:
                rest = " or ".join(f"--{name}" for name in given[1:])
                found.wrong(given[0], f"Megatron-LM does not take it with {rest}; give one of them")
        self._source, self._size = found.source, size
        self._layout = _layout(found, size)
        self._numbers = {name: found.number(name) for name in _NUMBERS}
        self._embedding, self._loss = found.has(_EMBEDDING), found.has(_LOSS)
        self._ahead = found.number(_AHEAD) or 0
        self.overlaps = not found.has("no-overlap-p2p-communication")
        """Whether messages overlap where stages are interleaved."""

    def divide(self, graph: LayerGraph) -> Division:
        """Return the layers of every stage of a model.

        Raises:
            PipeplanError: if its blocks cannot be dealt out so.
        """
        blocks = len(block_stack(graph).blocks)
        if (told := self._numbers[_BLOCKS]) not in (None, blocks):
            raise PipeplanError(
                f"{self._source}: --{_BLOCKS} {told}: the model has {blocks} blocks; make them "
                "equal"
            )
        stages = self._layout or self._by_numbers(blocks)
        chunks = len(stages) // self._size
        self._require_prediction(stages)
        if chunks > 1 and self._size <= (1 if self.overlaps else 2):
            why = "" if self.overlaps else " and --no-overlap-p2p-communication"
            raise PipeplanError(
                f"{self._source}: --pipeline-model-parallel-size {self._size}: Megatron-LM does "
                f"not interleave {chunks} stages a rank on as many ranks{why}; use more ranks, or "
                "one stage a rank"
            )
        return divide(graph, "|".join(filter(None, stages)), self._source)

    @property
    def empty(self) -> tuple[int, ...]:
        """Stages without a layer, which hand on what they receive."""
        return tuple(number for number, row in enumerate(self._layout or ()) if not row)

    def table(self, stages: int, share: int) -> ScheduleTable | None:
        """Return the order of ranks, where it is not that of the schedule's name.

        So it is with another number of microbatches in turn than there are ranks, and with empty
        stages, which keep their place in the order and run nothing.

        Args:
            stages: with layers.
            share: microbatches of a pipeline.

        Raises:
            PipeplanError: if Megatron-LM does not interleave so many microbatches.
        """
        count = stages + len(self.empty)
        turn = (self._numbers[_TURN] or self._size) if count > self._size else share
        rest = share % turn
        if count > self._size and (not self._size <= turn <= share or 0 < rest < self._size):
            raise PipeplanError(
                f"{self._source}: {plural(share, 'microbatch', 'es')} of each pipeline, {turn} in "
                f"turn, on {self._size} pipeline ranks: Megatron-LM's interleaved 1F1B takes "
                f"{_working(share, turn, self._size)}; change --global-batch-size or --{_TURN}"
            )
        if not self.empty and self._size in (count, turn):
            return None
        held = [number for number in range(count) if number not in self.empty]
        rounds = [range(first, min(first + turn, share)) for first in range(0, share, turn)]
        each = 1 if count == self._size else 2
        rows = []
        for rank in range(self._size):
            ahead = (count // self._size - 1) * turn + each * (self._size - 1 - rank)
            order = in_turn(range(rank, count, self._size), rounds, ahead)
            rows.append(
                tuple(op._replace(stage=held.index(op.stage)) for op in order if op.stage in held)
            )
        return ScheduleTable(tuple(rows), f"1F1B, {turn} microbatches in turn")

    def _by_numbers(self, blocks: int) -> tuple[str, ...]:
        rows = ["t" * count for count in self._counts(blocks)]
        rows[0] = "E" + rows[0]
        rows[-1] += "m" * self._ahead + "L"
        return tuple(rows)

    def _require_prediction(self, stages: tuple[str, ...]) -> None:
        """Refuse multi-token prediction of another number, or not in the last stage of a rank."""
        found = sum(row.count("m") for row in stages)
        if found != self._ahead:
            raise PipeplanError(
                f"{self._source}: --mtp-num-layers {self._ahead}: the layout has {found} m; make "
                "them equal"
            )
        early = [number for number, row in enumerate(stages[: -self._size]) if "m" in row]
        if early:
            raise PipeplanError(
                f"{self._source}: --{_LAYOUT}: m is in stage {early[0]}, but Megatron-LM has it in "
                f"the last stage of a rank, one of the last {self._size}; move it there"
            )

    def _counts(self, blocks: int) -> list[int]:
        """Return the number of blocks of every stage, as ``get_num_layers_to_build`` does."""
        first, last, depth = (self._numbers[name] for name in (_FIRST, _LAST, _EACH))
        of_rank: list[int | None] = [None] * self._size
        of_rank[0] = first
        of_rank[-1] = of_rank[-1] if last is None else last
        left = blocks + self._embedding + self._loss - sum(row or 0 for row in of_rank)
        each, rest = divmod(left, of_rank.count(None)) if None in of_rank else (0, left)
        numbers = [each if row is None else row for row in of_rank]
        chunks = max(each // depth, 1) if depth else self._numbers[_CHUNKS] or 1
        is_uneven = depth is not None and each != depth * chunks
        if rest or is_uneven or any(row < 1 or row % chunks for row in numbers):
            raise PipeplanError(
                f"{self._source}: {plural(blocks, 'block')} cannot be dealt out equally to "
                f"{plural(self._size * chunks, 'stage')} on {plural(self._size, 'pipeline rank')}; "
                f"{self._remedy(blocks)}, or give --{_LAYOUT}"
            )
        rows = [number // chunks for _ in range(chunks) for number in numbers]
        rows[0] -= self._embedding
        rows[-1] -= self._loss
        return rows

    def _remedy(self, blocks: int) -> str:
        """Return the numbers of ranks that divide the blocks, or what to change instead."""
        counted = blocks + self._embedding + self._loss
        if not any(self._numbers[name] for name in (_FIRST, _LAST, _EACH, _CHUNKS)):
            ranks = [str(n) for n in range(2, counted + 1) if counted % n == 0]
            if ranks:
                return f"--pipeline-model-parallel-size {', '.join(ranks)} would do"
        return "change --pipeline-model-parallel-size or the virtual stages"


def _working(share: int, turn: int, size: int) -> str:
    """Return the nearest numbers of microbatches that are interleaved."""
    if turn < size:
        return f"at least {size} in turn"
    works = [n for n in range(turn, share + 2 * turn) if not 0 < n % turn < size]
    near = sorted(works, key=lambda n: abs(n - share))[:2]
    return " or ".join(map(str, sorted(near))) + " microbatches"


def _layout(found: MegatronArguments, size: int) -> tuple[str, ...] | None:
    """Return the stages of a layout, or None; what is wrong with it is noted."""
    text = found.values.get(_LAYOUT)
    if text is None:
        return None
    try:
        stages = parse_layout(text, f"{found.source}: --{_LAYOUT}")
    except PipeplanError as error:
        found.problems += error.problems
        return None
    if len(stages) % size:
        found.wrong(
            _LAYOUT, f"{plural(len(stages), 'stage')} on {size} pipeline ranks; make it a multiple"
        )
    return stages
