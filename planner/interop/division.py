"""The layers of every stage, given by a layout of Megatron-LM or by the names of modules.

The grammar of ``--pipeline-model-parallel-layout``, as Megatron-LM documents it: ``|`` divides
stages; ``E`` is the embedding, ``t`` a transformer block, ``m`` a block of multi-token prediction,
``L`` the loss with what comes before it; ``x*n`` is n times the character x, ``(…)*n`` n times what
is in parentheses, bars included; commas are for the eye. ``Et*3|(tt|)*29,m|L`` is a stage of the
embedding and three blocks, 29 of two, one of ``m`` and one of ``L``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import NoReturn

from planner.errors import PipeplanError, shorten
from planner.model.blocks import BlockStack, block_stack
from planner.model.layer_graph import LayerGraph
from planner.plan.operations import compress_devices

Division = tuple[tuple[str, ...], ...]
"""Layers of each stage, in executable order."""
SYMBOLS = {
    "E": "embedding",
    "t": "transformer block",
    "m": "multi-token prediction",
    "L": "head and loss",
}
MOST_SYMBOLS = 100_000
"""Most symbols of a layout with all repetitions written out; more is a typing error."""
_TOO_MANY = f"more than {MOST_SYMBOLS:,} layers and bars; correct a number"
_NO_SYMBOL = {
    ")": "no '(' opens this parenthesis; remove it or add '('",
    "*": "there is nothing before '*' to repeat; write x*n, such as t*3",
    **dict.fromkeys("'\"", "quotes belong to the shell and are no part of a layout; remove them"),
    **dict.fromkeys("0123456789", "a number follows '*' only, such as t*3"),
    **dict.fromkeys(" \t\r\n", "layouts have no white space; remove it, or use a comma"),
}


def divide(
    graph: LayerGraph, stages: str | Sequence[Sequence[str]], source: str = "stages"
) -> Division:
    """Return the layers of every stage.

    Args:
        graph: the model.
        stages: a layout of Megatron-LM, or for each stage the names of its layers or of the modules
            around them. A layer without parameters that no name covers is where its input is.
        source: where they stand, for messages.

    Raises:
        PipeplanError: naming every stage, name or layer that is wrong.
    """
    if isinstance(stages, str):
        return divide_by_symbols(graph, parse_layout(stages, source), source)
    return _divide_by_names(graph, stages, source)


# --- Megatron-LM's layouts ------------------------------------------------------------------------


def parse_layout(text: str, source: str = "layout") -> tuple[str, ...]:
    """Return the stages of a layout, each as its symbols: ``Et*2|(t|)*2L`` is ``Ett t t L``.

    Args:
        text: in Megatron's grammar. An empty stage is an empty string.
        source: where it stands, for messages.

    Raises:
        PipeplanError: naming the character that is wrong, its position from 1, and what to write.
    """
    places = [place for place, character in enumerate(text) if character != ","]
    plain = text.replace(",", "")

    def wrong(at: int, problem: str) -> NoReturn:
        place = places[at] if at < len(places) else len(text)
        character = repr(text[place]) if place < len(text) else "the end"
        raise PipeplanError(f"{source}: character {place + 1}, {character}: {problem}")

    def expanded(at: int, end: int) -> str:
        found = ""
        while at < end:
            opened = at
            if plain[at] == "(":
                one, at = group(at)
            elif plain[at] in SYMBOLS or plain[at] == "|":
                one, at = plain[at], at + 1
            else:
                wrong(at, _NO_SYMBOL.get(plain[at]) or _unknown_symbol(plain[at]))
            if plain[at : at + 1] == "*":
                digits = re.compile("[0-9]*").match(plain, at + 1)
                assert digits is not None  # It may be empty.
                at = digits.end()
                if not digits[0]:
                    wrong(at, "expected a number after '*', such as t*3")
                if plain[at : at + 1] == "*":
                    wrong(at, "a repetition is not repeated again; write one number")
                # Seven digits are more than the most.
                times = int(digits[0].lstrip("0")[:7] or 0)
                if len(one) * times > MOST_SYMBOLS:
                    wrong(at - 1, _TOO_MANY)
                one *= times
            elif plain[opened] == "(":
                wrong(at, "expected *n after ')', such as (tt|)*4; add it")
            found += one
            if len(found) > MOST_SYMBOLS:
                wrong(at - 1, _TOO_MANY)
        return found

    def group(opened: int) -> tuple[str, int]:
        """Return what stands in parentheses, and the place behind them."""
        inside = re.compile("[^()]*").match(plain, opened + 1)
        assert inside is not None  # It may be empty.
        closed = inside.end()
        one = expanded(opened + 1, closed)
        if closed == len(plain):
            wrong(opened, "no ')' closes this parenthesis; add it, followed by *n")
        if plain[closed] == "(":
            wrong(closed, "parentheses do not nest; write the inner repetition out")
        if not inside[0]:
            wrong(opened, "nothing is in these parentheses; remove them")
        return one, closed + 1

    return tuple(expanded(0, len(plain)).split("|"))


def _unknown_symbol(character: str) -> str:
    known = ", ".join(f"{symbol} ({meaning})" for symbol, meaning in SYMBOLS.items())
    other = character.swapcase()
    hint = f" (upper and lower case differ: {other})" if other in SYMBOLS else ""
    return f"expected one of {known} or |{hint}"


def render_layout(stages: Sequence[str]) -> str:
    """Return the layout of stages, the inverse of :func:`parse_layout`, with repetitions joined.

    Args:
        stages: of the characters of :data:`SYMBOLS` each.
    """
    found = ""
    for stage, row in groupby(stages[:-1]):
        one, count = f"{_render_stage(stage)}|", len(list(row))
        found += one * count if count < 3 else f"({one})*{count},"
    return found + _render_stage(stages[-1])


def _render_stage(symbols: str) -> str:
    runs = ((symbol, len(list(row))) for symbol, row in groupby(symbols))
    return "".join(s * n if n < 3 else f"{s}*{n}" for s, n in runs)


def stages_of_counts(counts: Sequence[int], ahead: int = 0) -> tuple[str, ...]:
    """Return the symbols of stages with so many blocks each, between embedding and head.

    Args:
        counts: blocks of each stage.
        ahead: blocks of multi-token prediction in the last stage.
    """
    rows = ["t" * count for count in counts]
    rows[0] = "E" + rows[0]
    rows[-1] += "m" * ahead + "L"
    return tuple(rows)


def divide_by_symbols(graph: LayerGraph, stages: Sequence[str], source: str) -> Division:
    """Return the layers of stages that are given by their symbols.

    Args:
        graph: the model.
        stages: the symbols of each.
        source: where they stand, for messages.

    Raises:
        PipeplanError: naming what Megatron-LM or plans refuse.
    """
    stack = block_stack(graph)
    problems = list(_symbol_problems(stages, stack))
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)
    order = {name: place for place, name in enumerate(graph.layers)}
    ends = {"E": stack.before, "L": stack.after}
    blocks = {"t": iter(stack.blocks), "m": iter(stack.prediction)}
    rows = [
        [ends[symbol] if symbol in ends else next(blocks[symbol]).layers for symbol in stage]
        for stage in stages
    ]
    return tuple(
        tuple(sorted((name for part in row for name in part), key=order.__getitem__))
        for row in rows
    )


def _symbol_problems(stages: Sequence[str], stack: BlockStack) -> Iterator[str]:
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
                "out or give it a block"
            )


# --- names of modules -----------------------------------------------------------------------------


def _divide_by_names(graph: LayerGraph, stages: Sequence[Sequence[str]], source: str) -> Division:
    stage_of, problems = _named(graph, stages, source)
    problems += [f"{source}[{i}]: is empty; remove it" for i, row in enumerate(stages) if not row]
    unnamed = [name for name in graph.layers if name not in stage_of]
    if lost := [name for name in unnamed if graph.layers[name].parameters]:
        problems.append(
            f"{source}: {compress_devices(lost)}: have parameters but are in no stage; add them to "
            "one"
        )
    if problems:
        raise PipeplanError(problems)
    for name in unnamed:
        inputs = [stage_of[layer] for layer in graph.predecessors(name)]
        users = [stage_of[user] for user in graph.successors(name) if user in stage_of]
        stage_of[name] = max(inputs) if inputs else min(users, default=0)
    problems = [
        f"{source}: {producer!r} (stage {stage_of[producer]}) is used by {user!r} in earlier stage "
        f"{stage_of[user]}; move one of them"
        for producer, user in graph.edges
        if stage_of[user] < stage_of[producer]
    ]
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
    visits = {name for row in stages for name in row if "#" in name}
    modules = {layer: layer.partition("#")[0] for layer in graph.layers}
    for i, row in enumerate(stages):
        for j, name in enumerate(row):
            held = [
                layer
                for layer, module in modules.items()
                if layer == name
                or (layer not in visits and (module == name or module.startswith(f"{name}.")))
            ]
            if not held:
                problems.append(f"{source}[{i}][{j}]: {_unknown(graph, name)}")
            for layer in held:
                if layer in stage_of:
                    problems.append(
                        f"{source}[{i}][{j}]: {shorten(name)} names layer {layer!r}, which is in "
                        f"stage {stage_of[layer]} already; name it once"
                    )
                stage_of.setdefault(layer, i)
    return stage_of, problems


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
