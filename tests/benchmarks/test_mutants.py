"""``benchmarks.mutants``: what tests notice is killed, and the rest is told apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants.exchange import exchange, loaded_functions
from benchmarks.mutants.forked import run_forked

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SOURCE = """
from functools import cache


@cache
def area(width, height):
    return width * height


def halved(number):
    while number > 10:
        number //= 2
    return number


def unused(number):
    return number + 1


class Box:
    @property
    def side(self):
        return 2

    @side.setter
    def side(self, side):
        self.set_to = side
"""
TESTS = """
from package.boxes import area, halved


def test_area():
    assert area(2, 3) == 6


def test_halves():
    assert halved(40) == 10
"""
CHANGES = {
    "killed": ("width * height", "width / height"),
    "endless": ("number //= 2", "number = 40"),
    "survived": ("number > 10", "number >= 11"),
    "not covered": ("number + 1", "number - 1"),
    "unchanged": ("return number\n", "return (number)\n"),
}
RUN = """
import json, sys
from pathlib import Path
from benchmarks.mutants.mutant import Mutant
from benchmarks.mutants.rooms import Room
from benchmarks.mutants.session import run_mutants

root = Path.cwd()
path = root / "package" / "boxes.py"
source = path.read_text()
mutants = []
for before, after in json.loads(sys.argv[1]):
    line = source[: source.index(before)].count(chr(10)) + 1
    mutants.append(Mutant("boxes", path, line, line, before, after, source.replace(before, after)))
rooms = {"boxes": Room(("package/boxes.py",), ("tests",))}
outcomes, left_out = run_mutants(mutants, rooms, root, 5.0, lambda line: None)
print(json.dumps([[outcome.result, outcome.test] for outcome in outcomes]))
"""


@pytest.mark.extensive
def test_each_mutant_meets_the_tests_that_cover_it(tmp_path: Path) -> None:
    files = {"package/boxes.py": SOURCE, "tests/test_boxes.py": TESTS}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    changes = json.dumps(list(CHANGES.values()))
    run = subprocess.run(
        [sys.executable, "-c", RUN, changes],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = dict(zip(CHANGES, json.loads(run.stdout.splitlines()[-1]), strict=True))
    assert results == {
        "killed": ["killed", "tests/test_boxes.py::test_area"],
        "endless": ["killed", ""],
        "survived": ["survived", ""],
        "not covered": ["not covered", ""],
        "unchanged": ["unchanged", ""],
    }


def test_code_is_exchanged_below_decorators_and_in_properties(tmp_path: Path) -> None:
    path = tmp_path / "boxes.py"
    space: dict = {"__name__": "boxes"}
    exec(compile(SOURCE, str(path), "exec"), space)  # noqa: S102
    functions = loaded_functions(path)
    moved = "# a line more\n" + SOURCE
    assert exchange(functions, path, moved.replace("width * height", "width - height"))
    assert space["area"](7, 2) == 5
    exchange(functions, path, moved.replace("return 2", "return 4"))
    assert space["Box"]().side == 4
    box = space["Box"]()
    box.side = 9
    assert box.set_to == 9


def test_a_child_answers_and_leaves_nothing_behind() -> None:
    numbers: list[int] = []
    assert run_forked(lambda: numbers.append(1) or len(numbers), cpu_s=10) == 1
    assert numbers == []


def test_a_child_that_fails_or_never_ends_has_no_answer() -> None:
    def run_for_ever() -> None:
        while True:
            pass

    assert run_forked(lambda: 1 // 0, cpu_s=10) is None
    assert run_forked(run_for_ever, cpu_s=0.5) is None


def test_a_sample_is_the_same_again_and_changes_one_place_in_a_function(tmp_path: Path) -> None:
    pytest.importorskip("mutmut", reason="mutmut is missing; pip install -e '.[dev]' has it")
    from benchmarks.mutants.mutations import sample

    path = tmp_path / "boxes.py"
    path.write_text(SOURCE + "\n\nOUTSIDE = 1 + 2\n")
    mutants = sample({path: "boxes"}, 5, seed=0)
    assert mutants == sample({path: "boxes"}, 5, seed=0)
    assert len({mutant.source for mutant in mutants}) == 5
    everything = sample({path: "boxes"}, 1000, seed=0)
    lines = path.read_text().splitlines()
    for mutant in everything:
        changed = mutant.source.splitlines()
        differ = [at for at, line in enumerate(lines, 1) if changed[at - 1] != line]
        assert differ == [mutant.line]
        assert lines[mutant.line - 1].startswith("    ")
