"""Mutants of source files, made by mutmut's operators, and the exchange of loaded code for theirs.

Only the bodies of functions are mutated. Text is not (it is prose, mostly error messages), nor are
annotations, decorators and default arguments, which take effect when a module is imported.

Importing a mutated module afresh would mean importing all that imports it: the planner and the
tests. Instead each loaded function of a file gets the code of its namesake in the changed source.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

OPERATORS = tuple((kind, make) for kind, make in mutation_operators if make is not operator_string)
_CO_NEWLOCALS = 0x2  # set for functions, not for the bodies of classes and modules


@dataclass(frozen=True)
class Mutant:
    """A source file with one expression or statement changed.

    Attributes:
        path: of the file.
        line, last_line: of the changed code, from 1.
        before, after: the code, and what stands in its place.
        source: the whole file, changed.
    """

    path: Path
    line: int
    last_line: int
    before: str
    after: str
    source: str


class _Sites(libcst.CSTVisitor):
    """Collects nodes of the bodies of functions with what may replace them."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[libcst.CSTNode, libcst.CSTNode, int, int]] = []
        self._depth = 0

    def visit_FunctionDef(self, node: libcst.FunctionDef) -> bool:  # noqa: N802, named by libcst
        self._depth += 1
        node.body.visit(self)
        self._depth -= 1
        return False

    def visit_Annotation(self, node: libcst.Annotation) -> bool:  # noqa: N802, named by libcst
        return False

    def on_visit(self, node: libcst.CSTNode) -> bool:
        position = self.get_metadata(PositionProvider, node, None) if self._depth else None
        if position is not None:
            for kind, replacements in OPERATORS:
                for replacement in replacements(node) if isinstance(node, kind) else ():
                    lines = position.start.line, position.end.line
                    self.found.append((node, replacement, *lines))
        return super().on_visit(node)


def sample(paths: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Return mutants drawn from files, in proportion to the lines that can be mutated."""
    modules = {path: MetadataWrapper(libcst.parse_module(path.read_text())) for path in paths}
    sites = {path: _Sites() for path in paths}
    for path, module in modules.items():
        module.visit(sites[path])
    lines = [len({site[2] for site in sites[path].found}) for path in paths]
    ends = [count * sum(lines[:n]) // max(1, sum(lines)) for n in range(len(lines) + 1)]
    rng, drawn = random.Random(seed), []
    for path, (first, last) in zip(paths, pairwise(ends), strict=True):
        found, module = sites[path].found, modules[path].module
        for node, replacement, line, last_line in rng.sample(found, min(last - first, len(found))):
            changed = module.deep_replace(node, replacement).code
            codes = (module.code_for_node(each).strip() for each in (node, replacement))
            drawn.append(Mutant(path, line, last_line, *codes, changed))
    return drawn


# --- exchange of code -----------------------------------------------------------------------------


def loaded_functions(path: Path) -> list[FunctionType]:
    """Return every living function that was defined by a file."""
    functions = (each for each in gc.get_objects() if type(each) is FunctionType)
    return [each for each in functions if each.__code__.co_filename == str(path)]


def exchange(functions: Sequence[FunctionType], mutant: Mutant) -> bool:
    """Give loaded functions the code that they have in the changed source.

    Returns:
        Whether any function does something else now; not so where both compile to the same.

    Raises:
        ValueError: where the free variables of a closure changed.
    """
    compiled = compile(mutant.source, str(mutant.path), "exec", dont_inherit=True)
    changed = _by_name(_functions_in(compiled))
    renewed = {
        old: new
        for name, codes in _by_name({function.__code__ for function in functions}).items()
        for old, new in zip(codes, changed.get(name, ()), strict=False)
    }
    for function in functions:
        function.__code__ = renewed.get(function.__code__, function.__code__)
    return any(_instructions(old) != _instructions(new) for old, new in renewed.items())


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & _CO_NEWLOCALS:
                yield constant
            yield from _functions_in(constant)


def _instructions(code: CodeType) -> tuple[Any, ...]:
    """Return what a code does, without where it stands in the source."""
    constants = (
        _instructions(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
    )
    return (code.co_code, code.co_names, code.co_varnames, *constants)


def _by_name(codes: Iterator[CodeType] | set[CodeType]) -> dict[str, list[CodeType]]:
    """Return codes by qualified name; those of one name, as of a property, in their order."""
    named: defaultdict[str, list[CodeType]] = defaultdict(list)
    for code in sorted(codes, key=lambda code: code.co_firstlineno):
        named[code.co_qualname].append(code)
    return named
