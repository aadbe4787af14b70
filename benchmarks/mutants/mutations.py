"""Mutants of a source file, made by the operators of mutmut, and a sample of them.

Only the bodies of functions are mutated. Text is not (it is prose, mostly error messages), nor
are annotations, decorators and default arguments, which take effect when a module is imported.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

from benchmarks.mutants.mutant import Mutant

OPERATORS = tuple((kind, make) for kind, make in mutation_operators if make is not operator_string)


@dataclass(frozen=True)
class _Site:
    """A node of a module and what it may be replaced by."""

    node: libcst.CSTNode
    replacement: libcst.CSTNode
    line: int
    last_line: int


class _Sites(libcst.CSTVisitor):
    """Collect what can be mutated in the bodies of functions."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Site] = []
        self._depth = 0

    def visit_FunctionDef(self, node: libcst.FunctionDef) -> bool:  # noqa: N802, named by libcst
        """Visit the body alone, not the decorators, the parameters or the annotations."""
        self._depth += 1
        node.body.visit(self)
        self._depth -= 1
        return False

    def visit_Annotation(self, node: libcst.Annotation) -> bool:  # noqa: N802, named by libcst
        """Leave annotations of local variables as they are."""
        return False

    def on_visit(self, node: libcst.CSTNode) -> bool:
        """Note every replacement of a node, then visit its children."""
        if self._depth:
            self.found += self._of(node)
        return super().on_visit(node)

    def _of(self, node: libcst.CSTNode) -> Iterator[_Site]:
        position = self.get_metadata(PositionProvider, node, None)
        if position is None:
            return
        for kind, replacements in OPERATORS:
            if isinstance(node, kind):
                for replacement in replacements(node):
                    yield _Site(node, replacement, position.start.line, position.end.line)


def sample(files: Mapping[Path, str], count: int, seed: int) -> list[Mutant]:
    """Return mutants drawn from files in proportion to the lines of their functions' bodies.

    Args:
        files: the room of each file.
        count: mutants to draw; all where there are fewer.
        seed: of the drawing. The same files and seed give the same mutants.
    """
    modules = {path: MetadataWrapper(libcst.parse_module(path.read_text())) for path in files}
    sites = {path: _sites(module) for path, module in modules.items()}
    lines = [len({site.line for site in found}) for found in sites.values()]
    sizes = _portions(lines, [len(found) for found in sites.values()], count)
    generator = random.Random(seed)
    return [
        _mutant(files[path], path, modules[path].module, site)
        for (path, found), size in zip(sites.items(), sizes, strict=True)
        for site in sorted(generator.sample(found, size), key=lambda site: site.line)
    ]


def _sites(module: MetadataWrapper) -> list[_Site]:
    visitor = _Sites()
    module.visit(visitor)
    return visitor.found


def _portions(weights: Sequence[int], limits: Sequence[int], count: int) -> list[int]:
    """Divide a count in proportion to weights, none above its limit."""
    portions = [0] * len(weights)
    for _ in range(min(count, sum(limits))):
        below = [index for index, limit in enumerate(limits) if portions[index] < limit]
        index = min(below, key=lambda index: (portions[index] + 1) / max(weights[index], 0.5))
        portions[index] += 1
    return portions


def _mutant(room: str, path: Path, module: libcst.Module, site: _Site) -> Mutant:
    changed = module.deep_replace(site.node, site.replacement)
    return Mutant(
        room,
        path,
        site.line,
        site.last_line,
        module.code_for_node(site.node).strip(),
        module.code_for_node(site.replacement).strip(),
        changed.code,
    )
