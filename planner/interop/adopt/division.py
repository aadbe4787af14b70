"""The layers of stages given by a Megatron-LM layout or by module names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from planner.errors import PipeplanError, shorten
from planner.interop.importing.megatron_layout import parse_layout
from planner.model.blocks import BlockStack, block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import compress_devices

Division = tuple[tuple[str, ...], ...]
"""Layers of each stage, in executable order."""


def divide(
    graph: LayerGraph, stages: str | Sequence[Sequence[str]], source: str = "stages"
) -> Division:
    """The layers of every stage.

    Args:
        graph: the model.
        stages: a layout in Megatron-LM's grammar, see
        :mod:`planner.interop.importing.megatron_layout`, or
            for each stage the names of its layers or of the modules around them.
        source: where they stand, for messages.

    Raises:
        PipeplanError: naming every stage, name or layer that is wrong.
    """
    if isinstance(stages, str):
        return _by_layout(graph, stages, source)
    return _by_names(graph, stages, source)


def _by_layout(graph: LayerGraph, text: str, source: str) -> Division:
    stages = parse_layout(text, source)
    stack = block_stack(graph)
    problems = list(_layout_problems(stages, stack))
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)
    order = {name: place for place, name in enumerate(graph.layers)}
    return tuple(tuple(sorted(row, key=order.__getitem__)) for row in _layers_of(stages, stack))


def _layers_of(stages: Sequence[str], stack: BlockStack) -> Iterator[list[str]]:
    ends = {"E": stack.before, "L": stack.after}
    blocks = {"t": iter(stack.blocks), "m": iter(stack.prediction)}
    for symbols in stages:
        layers: list[str] = []
        for symbol in symbols:
            layers += ends[symbol] if symbol in ends else next(blocks[symbol]).layers
        yield layers


def _layout_problems(stages: Sequence[str], stack: BlockStack) -> Iterator[str]:
    """Yield what is wrong with a layout, for Megatron-LM or for plans."""
    symbols = "".join(stages)
    if symbols[:1] != "E" or symbols.count("E") > 1:
        yield (
            "E must appear exactly once, at the start; begin the first stage with it, and remove "
            "others"
        )
    if symbols[-1:] != "L" or symbols.count("L") > 1:
        yield (
            "L must appear exactly once, at the end; end the last stage with it, and remove others"
        )
    kinds = (
        ("t", stack.blocks, "blocks"),
        ("m", stack.prediction, "blocks of multi-token prediction"),
    )
    for symbol, blocks, kind in kinds:
        if symbols.count(symbol) != len(blocks):
            named = f" ({blocks[0].name} to {blocks[-1].name})" if blocks else ""
            yield (
                f"{symbol} appears {symbols.count(symbol)} times, but the model has {len(blocks)} "
                f"{kind}{named}; make them equal"
            )
    if "t" in symbols[symbols.find("m") :] and "m" in symbols:
        yield "m stands before a t; multi-token prediction follows all blocks"
    if sum("m" in stage for stage in stages) > 1:
        yield "m stands in several stages; Megatron-LM has all multi-token prediction in one"
    for number, stage in enumerate(stages):
        if not stage:
            yield (
                f"stage {number} is empty; Megatron-LM allows empty stages, plans do not: leave it "
                f"out or give it a block"
            )


def _by_names(graph: LayerGraph, stages: Sequence[Sequence[str]], source: str) -> Division:
    stage_of, problems = _named(graph, stages, source)
    problems += [f"{source}[{i}]: is empty; remove it" for i, row in enumerate(stages) if not row]
    unnamed = [name for name in graph.layers if name not in stage_of]
    lost = [name for name in unnamed if graph.layers[name].parameters]
    if lost:
        problems.append(
            f"{source}: {compress_devices(lost)}: have parameters but are in no stage; add them to "
            f"one"
        )
    if problems:
        raise PipeplanError(problems)
    for name in unnamed:
        stage_of[name] = _stage_of_unnamed(graph, name, stage_of)
    problems = list(_backwards(graph, stage_of, source))
    if problems:
        raise PipeplanError(problems)
    return tuple(
        tuple(name for name in graph.layers if stage_of[name] == number)
        for number in range(len(stages))
    )


def _named(
    graph: LayerGraph, stages: Sequence[Sequence[str]], source: str
) -> tuple[dict[str, int], list[str]]:
    """Return the stages of named layers; a visit's own name overrides its module's."""
    problems: list[str] = []
    stage_of: dict[str, int] = {}
    rows = [(i, j, name) for i, row in enumerate(stages) for j, name in enumerate(row)]
    visits = {name for _, _, name in rows if "#" in name}
    for i, j, name in rows:
        field, held = f"{source}[{i}][{j}]", _layers_in(graph, name)
        held = [layer for layer in held if layer == name or layer not in visits]
        if not held:
            problems.append(f"{field}: {_unknown(graph, name)}")
        for layer in held:
            if layer in stage_of:
                problems.append(
                    f"{field}: {shorten(name)} names layer {layer!r}, which is in stage "
                    f"{stage_of[layer]} already; name it once"
                )
            stage_of.setdefault(layer, i)
    return stage_of, problems


def _layers_in(graph: LayerGraph, name: str) -> list[str]:
    """Return the layers that are, or are inside, a module, with all its visits."""
    if name in graph.layers and "#" in name:
        return [name]
    modules = {layer: layer.partition("#")[0] for layer in graph.layers}
    return [layer for layer, path in modules.items() if path == name or path.startswith(f"{name}.")]


def _unknown(graph: LayerGraph, name: str) -> str:
    around = [layer for layer in graph.layers if name.startswith(f"{layer.partition('#')[0]}.")]
    if around:
        return (
            f"{shorten(name)} is inside layer {around[0]!r}, which cannot be divided; name "
            f"{around[0]!r}"
        )
    close = get_close_matches(name, list(graph.layers), n=3)
    hint = " or ".join(map(repr, close)) or "the names that `pipeplan trace` writes"
    return f"{shorten(name)} is no layer of {graph.name!r}; use {hint}"


def _stage_of_unnamed(graph: LayerGraph, name: str, stage_of: dict[str, int]) -> int:
    """Return the stage of a layer without parameters: its last input's, else its first user's."""
    inputs = [stage_of[layer] for layer in graph.predecessors(name)]
    if inputs:
        return max(inputs)
    return min((stage_of[user] for user in graph.successors(name) if user in stage_of), default=0)


def _backwards(graph: LayerGraph, stage_of: dict[str, int], source: str) -> Iterator[str]:
    for producer, user in graph.edges:
        if stage_of[user] < stage_of[producer]:
            yield (
                f"{source}: {producer!r} (stage {stage_of[producer]}) is used by {user!r} in "
                f"earlier stage {stage_of[user]}; move one of them"
            )
