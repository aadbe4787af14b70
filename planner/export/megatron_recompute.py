"""Recomputation in Megatron-LM's terms: whole blocks, the first so many of every stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.artifacts.blocks import BlockStack
from planner.artifacts.plan import Plan, Stage
from planner.units import plural

FULL = "--recompute-granularity full"


@dataclass(frozen=True)
class Recomputed:
    """What Megatron-LM recomputes for a plan.

    Attributes:
        flags: that make it so.
        layers: of each stage, as Megatron recomputes them.
        notes: where that is not what the plan says.
    """

    flags: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def recomputed(plan: Plan, stack: BlockStack) -> Recomputed:
    """The fewest blocks of every stage that save at least the blocks the plan recomputes.

    ``--recompute-method uniform`` recomputes all blocks, ``block`` the first N of every stage,
    virtual ones too. Neither knows embedding and head.

    Args:
        plan: whose stages hold whole blocks.
        stack: its blocks.
    """
    held = [_blocks_in(stage, stack) for stage in plan.stages]
    again = [_touched(row, stage) for row, stage in zip(held, plan.stages, strict=True)]
    number = max(map(len, again))
    layers = tuple(tuple(layer for block in row[:number] for layer in block) for row in held)
    return Recomputed(_flags(held, number), layers, tuple(_notes(plan, stack, layers, number)))


def _blocks_in(stage: Stage, stack: BlockStack) -> list[tuple[str, ...]]:
    held = set(stage.layers)
    return [block.layers for block in stack.blocks if held.issuperset(block.layers)]


def _touched(blocks: Sequence[tuple[str, ...]], stage: Stage) -> list[tuple[str, ...]]:
    """Blocks of which the plan recomputes something."""
    return [block for block in blocks if not set(stage.recompute).isdisjoint(block)]


def _flags(held: Sequence[Sequence[tuple[str, ...]]], number: int) -> tuple[str, ...]:
    if number == 0:
        return ()
    if all(len(row) <= number for row in held):
        return (FULL, "--recompute-method uniform", "--recompute-num-layers 1")
    return (FULL, "--recompute-method block", f"--recompute-num-layers {number}")


def _notes(
    plan: Plan, stack: BlockStack, layers: Sequence[tuple[str, ...]], number: int
) -> Iterator[str]:
    ends = {*stack.before, *stack.after}
    left_out = [name for stage in plan.stages for name in stage.recompute if name in ends]
    if left_out:
        yield f"Megatron recomputes blocks only: {', '.join(left_out)} keep what they need"
    same = all(
        set(stage.recompute) - ends == set(row)
        for stage, row in zip(plan.stages, layers, strict=True)
    )
    if not same:
        yield (
            f"Megatron recomputes the first {plural(number, 'block')} of every stage, where the "
            "plan chooses its layers one by one; the predicted time and memory count that"
        )
