"""Imports between modules, and what follows: modules with one importer, and cycles."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Sequence

import networkx as nx

from benchmarks.structure.sources import Module


def import_graph(modules: Sequence[Module]) -> nx.DiGraph:
    """Return the graph of imports among modules, an edge from the importer to the imported.

    Imports inside functions count like those at the top. Imports for type checkers alone (below
    ``if TYPE_CHECKING:``) and imports by a computed name do not. ``from package import name`` is
    an import of the module ``package.name`` where there is one, else of the package.
    """
    names = {module.name for module in modules}
    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    for module in modules:
        imported = set(_imported(module, names)) - {module.name}
        graph.add_edges_from((module.name, name) for name in imported)
    return graph


def with_one_importer(graph: nx.DiGraph) -> list[str]:
    """Return the modules that exactly one other module imports."""
    return sorted(name for name, importers in graph.in_degree() if importers == 1)


def cycles(graph: nx.DiGraph) -> list[list[str]]:
    """Return the sets of modules that reach each other by imports, the largest first."""
    groups = nx.strongly_connected_components(graph)
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda g: (-len(g), g))


def _imported(module: Module, names: Container[str]) -> Iterator[str]:
    for node in _run_nodes(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            source = _source(node, module.package)
            for alias in node.names:
                found = f"{source}.{alias.name}"
                yield from (name for name in [found if found in names else source] if name in names)


def _source(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that names are imported from."""
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without what only a type checker reads."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _is_for_type_checkers(condition: ast.expr) -> bool:
    match condition:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False
