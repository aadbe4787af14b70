"""Modules that layers belong to, and the stack of numbered blocks: ``h.0``, ``h.1``, …."""

from __future__ import annotations

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
        blocks: in executable order.
        after: layers after the last block: final norm, head and loss.
    """

    before: tuple[str, ...]
    blocks: tuple[Block, ...]
    after: tuple[str, ...]


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
    """Return the numbered module that contains a layer: its FQN up to the first number.

    Args:
        layer: a layer's name; ``#2`` of a second visit is no part of the FQN.

    Returns:
        None if no part of the FQN is a number.
    """
    parts = layer.partition("#")[0].split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if first is None else ".".join(parts[: first + 1])


def first_blocks(layers: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the layers of the first numbered blocks of a stage.

    Args:
        layers: of the stage, in executable order.
        count: of blocks; all of them if there are fewer.
    """
    blocks = list(dict.fromkeys(filter(None, map(block_name, layers))))[:count]
    return tuple(layer for layer in layers if block_name(layer) in blocks)


def block_count(layers: Sequence[str]) -> int:
    """Return the number of numbered blocks that layers belong to."""
    return len({block for block in map(block_name, layers) if block is not None})


def block_stack(graph: LayerGraph) -> BlockStack:
    """Divide a graph at its one stack of numbered blocks.

    Raises:
        PipeplanError: with every reason, if it has none or several, if other layers are between its
            blocks or a block runs several times, or if nothing comes before or after.
    """
    names = tuple(graph.layers)
    runs = [(block, tuple(row)) for block, row in groupby(names, block_name)]
    found = [Block(block, row) for block, row in runs if block is not None]
    problems = _stack_problems(found) or _order_problems(runs)
    if problems:
        raise PipeplanError(f"model {graph.name!r}: {problem}" for problem in problems)
    before = names[: names.index(found[0].layers[0])]
    after = names[names.index(found[-1].layers[-1]) + 1 :]
    return BlockStack(before, tuple(found), after)


def _stack_problems(found: Sequence[Block]) -> list[str]:
    """Check that there is one list of numbered modules."""
    members: dict[str, set[str]] = {}
    for block in found:
        members.setdefault(block.name.rpartition(".")[0], set()).add(block.name)
    if len(members) == 1:
        return []
    if not members:
        return [
            "no layer lies in a numbered module such as h.0; one stack of blocks (a ModuleList) is "
            "needed, divide the layers by names instead"
        ]
    stacks = ", ".join(
        f"{stem or 'the model itself'} ({len(row)})" for stem, row in members.items()
    )
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
            f"layers {', '.join(between)} are between numbered blocks; divide the layers by "
            "names instead"
        )
    blocks = [str(runs[position][0]) for position in numbered]
    again = [name for name in dict.fromkeys(blocks) if blocks.count(name) > 1]
    if again:
        problems.append(f"blocks {', '.join(again)} run several times; a stack runs each once")
    if first == 0:
        problems.append("no layer comes before the first block: there is no embedding")
    if last == len(runs) - 1:
        problems.append("no layer comes after the last block: there is no head and no loss")
    return problems
