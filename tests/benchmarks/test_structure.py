"""``benchmarks.structure`` on a small package whose figures can be counted by hand."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from textwrap import dedent

import pytest
from warm_python import warm_python

from benchmarks.structure.definitions import (
    Lengths,
    ambiguous_classes,
    continued_docstrings,
    function_lengths,
)
from benchmarks.structure.entered import EnteredFiles
from benchmarks.structure.imports import cycles, import_graph, with_one_importer
from benchmarks.structure.measure import measure
from benchmarks.structure.sources import Module, Size, folder_size, read_modules
from benchmarks.structure.table import render

FILES = {
    "planner/__init__.py": "",
    "planner/plan.py": """
        '''A plan.'''
        from planner import units
        class Stage:
            '''Of a plan.'''
        class _Hidden: ...
        LIMIT = 3
        '''Of the stages.'''
        def save():
            from planner.check import checked
            return checked
    """,
    "planner/check.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from planner.cost import Stage
        def checked():
            from planner.plan import save
            return save
    """,
    "planner/cost.py": """
        from . import units
        class Stage:
            '''A stage. Of which there are many.'''
            def time(self):
                '''Return the time.

                In seconds.
                '''
                return 1
        class _Hidden: ...
    """,
    "planner/units.py": "S = 1\n",
    "executor/__init__.py": "",
    "executor/__main__.py": "from planner.plan import save\n",
    "executor/room/part.py": "import planner.cost\n",
    "executor/room/page.html": "<p>\n",
    "executor/__pycache__/part.pyc": "",
    "benchmarks/speed.py": "def a(): ...\ndef b(): ...\n",
    "tests/test_plan.py": "\n\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return tmp_path


def product(tree: Path) -> list[Module]:
    return read_modules(tree, "planner") + read_modules(tree, "executor")


def test_imports_in_functions_count_and_those_for_type_checkers_do_not(tree: Path) -> None:
    edges = set(import_graph(product(tree)).edges)
    assert edges == {
        ("planner.plan", "planner.units"),
        ("planner.plan", "planner.check"),
        ("planner.check", "planner.plan"),
        ("planner.cost", "planner.units"),
        ("executor.__main__", "planner.plan"),
        ("executor.room.part", "planner.cost"),
    }


def test_modules_with_one_importer_and_cycles_are_named(tree: Path) -> None:
    graph = import_graph(product(tree))
    assert with_one_importer(graph) == ["planner.check", "planner.cost"]
    assert cycles(graph) == [["planner.check", "planner.plan"]]


def test_a_public_class_name_in_two_modules_is_ambiguous(tree: Path) -> None:
    modules = read_modules(tree, "planner")
    assert ambiguous_classes(modules) == {"Stage": ["planner.cost", "planner.plan"]}


def test_lengths_include_signature_and_docstring(tree: Path) -> None:
    assert function_lengths(read_modules(tree, "planner")) == Lengths(3, 5.4, 6)


def test_docstrings_of_classes_and_attributes_that_begin_with_of_are_found(tree: Path) -> None:
    modules = read_modules(tree, "planner")
    assert continued_docstrings(modules) == ["planner.plan:4", "planner.plan:7"]


def test_all_files_count_but_lines_of_python_alone(tree: Path) -> None:
    assert folder_size(tree / "executor") == Size(lines=2, files=4, loose=2)


def test_the_table_shows_each_number(tree: Path) -> None:
    table = render(measure(tree, {"whole": ["a.py", "b.py"]}))
    for row in (
        "| lines in executor/, files | 2 / 4, 2 loose |",
        "| modules with exactly one importer | 2 of 8 |",
        "| import cycles between modules | 1, of 2 modules |",
        "| files on a microbatch's way, whole backward | 2 |",
        "| files on a microbatch's way, split backward | not measured |",
        "| class names with two meanings | 1 |",
        "| function length in planner/, median / p90 / longest | 3 / 5.4 / 6 |",
        "| docstrings that continue an identifier | 2 |",
    ):
        assert row in table


def test_the_files_of_an_iteration_are_called_in_it_or_on_the_stack(tmp_path: Path) -> None:
    """``loop`` prepares, then in each step calls ``stage``, in a thread too, and the optimizer."""
    programs = {
        "loop.py": """
            def train(step, prepare, stage, send, report):
                prepare()
                for _ in range(2):
                    stage()
                    step(send)
                report()
        """,
        "prepare.py": "def run(): ...",
        "stage.py": "def run(): ...",
        "send.py": "def run(): ...",
        "report.py": "def run(): ...",
    }
    functions = {}
    for name, text in programs.items():
        space: dict = {}
        exec(compile(dedent(text), str(tmp_path / name), "exec"), space)  # noqa: S102
        functions[name] = space.get("run") or space["train"]
    entered = EnteredFiles(tmp_path)

    def step(send) -> None:
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        entered.end_step()

    others = (functions[f"{name}.py"] for name in ("prepare", "stage", "send", "report"))
    entered.watch(lambda: functions["loop.py"](step, *others))
    assert entered.files == ["loop.py", "send.py", "stage.py"]


@pytest.mark.extensive
def test_this_tree_has_no_cycle_and_one_meaning_of_each_class_name() -> None:
    words = [warm_python(), "-m", "benchmarks.structure", "--static", "--json"]
    root = Path(__file__).resolve().parent.parent.parent
    run = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root)
    found = json.loads(run.stdout)
    assert found["modules"] > 100
    assert found["ways"] == {}
    assert found["cycles"] == []
    assert found["ambiguous_classes"] == {}
    assert found["continued_docstrings"] == []
