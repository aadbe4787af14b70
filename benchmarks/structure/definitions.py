"""Class names, lengths of functions, and first words of docstrings."""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.structure.sources import Module

CONTINUATIONS = frozenset({"Of"})
"""First words of docstrings that go on from the identifier instead of being a sentence."""


@dataclass(frozen=True)
class Lengths:
    """Lines of functions and methods, from ``def`` to the end, the docstring included."""

    median: float
    ninetieth_percentile: float
    longest: int


def ambiguous_classes(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Return the modules of each public class name that is defined in more than one.

    Counted are classes at the top of a module.
    """
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}:
            if not name.startswith("_"):
                places[name].append(module.name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def function_lengths(modules: Sequence[Module]) -> Lengths:
    """Return how long functions and methods are, nested ones included, decorators not."""
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    if len(lengths) < 2:
        lengths = (lengths or [0]) * 2  # quantiles are of two at least
    ninetieth = statistics.quantiles(lengths, n=10, method="inclusive")[-1]
    return Lengths(statistics.median(lengths), ninetieth, max(lengths))


def continued_docstrings(modules: Sequence[Module]) -> list[str]:
    """Return the places of docstrings that begin as a continuation of their identifier.

    The docstrings of modules, classes, functions and attributes are looked at.
    """
    return [
        f"{module.name}:{line}"
        for module in modules
        for line, text in sorted(_docstrings(module.tree))
        if text.split()[:1] and text.split()[0] in CONTINUATIONS
    ]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of strings that stand alone as statements."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                yield line, text
