"""The structure of a tree, as numbers and the names behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.structure.definitions import (
    Lengths,
    ambiguous_classes,
    continued_docstrings,
    function_lengths,
)
from benchmarks.structure.imports import cycles, import_graph, with_one_importer
from benchmarks.structure.sources import Size, folder_size, read_modules

PRODUCT = ("planner", "executor")
FOLDERS = (*PRODUCT, "benchmarks", "tests")


@dataclass(frozen=True)
class Structure:
    """What was measured of a tree.

    Imports, class names and docstrings are those of planner/ and executor/.

    Attributes:
        sizes: by folder.
        function_lengths: by folder of Python code other than tests.
        modules: how many modules there are.
        with_one_importer: modules that exactly one other imports.
        cycles: sets of modules that reach each other by imports.
        ambiguous_classes: the modules of each class name that several define.
        continued_docstrings: module and line of docstrings that are no sentence.
        ways: files of executor/ that a microbatch passes, by its kind of backward; none if that
            was not measured.
    """

    sizes: dict[str, Size]
    function_lengths: dict[str, Lengths]
    modules: int
    with_one_importer: list[str]
    cycles: list[list[str]]
    ambiguous_classes: dict[str, list[str]]
    continued_docstrings: list[str]
    ways: dict[str, list[str]]


def measure(root: Path, ways: Mapping[str, Sequence[str]]) -> Structure:
    """Measure the tree in a folder.

    Args:
        root: the repository.
        ways: files on a microbatch's way by its kind of backward, if they are known.
    """
    code = {folder: read_modules(root, folder) for folder in FOLDERS if folder != "tests"}
    modules = [module for package in PRODUCT for module in code[package]]
    graph = import_graph(modules)
    return Structure(
        {folder: folder_size(root / folder) for folder in FOLDERS},
        {folder: function_lengths(modules) for folder, modules in code.items()},
        len(modules),
        with_one_importer(graph),
        cycles(graph),
        ambiguous_classes(modules),
        continued_docstrings(modules),
        {backward: list(files) for backward, files in ways.items()},
    )
