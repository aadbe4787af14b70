"""Modules that layers belong to, and the stack of numbered blocks: ``h.0``, ``h.1``, …."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.errors import PipeplanError
from planner.model.layer_graph import LayerGraph


@dataclass(frozen=True)
class Block:
    """A numbered module and the layers within it: one, or several where a graph is finer.

    Attributes:
        name: FQN up to its first number, such as ``transformer.h.3``.
        layers: names, in executable order.
    """

    name: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class BlockStack:
    """A layer graph as embedding, blocks and head.

    Attributes:
        before: layers before the first block.
        blocks: in executable order; what multi-token prediction takes from behind the last one,
            such as the final norm, is a part of that.
        after: layers after the last block: final norm, head and loss.
        prediction: blocks of multi-token prediction, in a list with "mtp" in its name.
    """

    before: tuple[str, ...]
    blocks: tuple[Block, ...]
    after: tuple[str, ...]
    prediction: tuple[Block, ...] = ()


_PREDICTION = re.compile(r"(?:^|[._])(?:mtp|multi_?token_prediction)(?:[._]|$)")
LOSS = "loss"
"""The name that the tracer gives the layer of the loss; other tools add the loss themselves."""


def module_of(layer: str) -> str:
    """Return the module of a layer: an entry of a top-level list, or a top-level child.

    ``layers.3`` is itself, ``lm_head`` too; ``model.layers.3`` is within ``model``. ``norm#2``, a
    second run of the module ``norm``, is within ``norm``.
    """
    parts = layer.partition("#")[0].split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]


def block_name(layer: str) -> str | None:
    """Return the numbered module that contains a layer, its FQN up to the first number, or None."""
    parts = layer.partition("#")[0].split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if first is None else ".".join(parts[: first + 1])


def first_blocks(layers: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the layers of so many first numbered blocks of a stage, in executable order."""
    blocks = list(dict.fromkeys(filter(None, map(block_name, layers))))[:count]
    return tuple(layer for layer in layers if block_name(layer) in blocks)


def block_count(layers: Sequence[str]) -> int:
    """Return the number of numbered blocks that layers belong to."""
    return len({block for block in map(block_name, layers) if block is not None})


def block_stack(graph: LayerGraph) -> BlockStack:
    """Divide a graph at its one stack of numbered blocks, beside one of multi-token prediction.

    Raises:
        PipeplanError: with every reason, if it has none or several, if other layers are between its
            blocks or a block runs several times, or if nothing comes before or after.
    """
    ahead = tuple(name for name in graph.layers if _PREDICTION.search(name) and block_name(name))
    names = tuple(name for name in graph.layers if name not in ahead)
    runs = [(block, tuple(row)) for block, row in groupby(names, block_name)]
    found = [Block(block, row) for block, row in runs if block is not None]
    problems = _stack_problems(found) or _order_problems(runs)
    if problems:
        raise PipeplanError(f"model {graph.name!r}: {problem}" for problem in problems)
    before = names[: names.index(found[0].layers[0])]
    after = names[names.index(found[-1].layers[-1]) + 1 :]
    taken = {source for name in ahead for source in graph.predecessors(name)}
    last = max((place + 1 for place, name in enumerate(after) if name in taken), default=0)
    found[-1] = Block(found[-1].name, found[-1].layers + after[:last])
    prediction = (Block(str(name), tuple(row)) for name, row in groupby(ahead, block_name))
    return BlockStack(before, tuple(found), after[last:], tuple(prediction))


def _stack_problems(found: Sequence[Block]) -> list[str]:
    """Check that there is one list of numbered modules."""
    members = Counter(stem for stem, _ in {b.name.rpartition(".")[::2]: 0 for b in found})
    if len(members) == 1:
        return []
    if not members:
        return [
            "no layer lies in a numbered module such as h.0; one stack of blocks (a ModuleList) is "
            "needed, divide the layers by names instead"
        ]
    stacks = ", ".join(f"{stem or 'the model itself'} ({row})" for stem, row in members.items())
    pair = {part for stem in members for part in ("encoder", "decoder") if part in stem.split(".")}
    kind = "an encoder and a decoder" if len(pair) > 1 else f"{len(members)} stacks of blocks"
    return [f"it has {kind}: {stacks}; one stack is expected, divide the layers by names instead"]


def _order_problems(runs: Sequence[tuple[str | None, tuple[str, ...]]]) -> list[str]:
    """Check that the blocks follow each other, each once, with layers before and after."""
    problems = []
    numbered = [position for position, (block, _) in enumerate(runs) if block is not None]
    first, last = numbered[0], numbered[-1]
    between = [layer for block, row in runs[first:last] if block is None for layer in row]
    if between:
        problems.append(
            f"layers {', '.join(between)} are between numbered blocks; divide by names instead"
        )
    again = [
        str(name) for name, row in Counter(name for name, _ in runs).items() if name and row > 1
    ]
    if again:
        problems.append(f"blocks {', '.join(again)} run several times; a stack runs each once")
    if first == 0:
        problems.append("no layer comes before the first block: there is no embedding")
    if last == len(runs) - 1:
        problems.append("no layer comes after the last block: there is no head and no loss")
    return problems
