"""The figures of README's front page are those that its own commands print."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from builders import ROOT
from documents import snippets
from warm_python import warm_python

from planner import load_plan
from planner.units import format_seconds

README = ROOT / "README.md"
PLANNERS = ("even", "even-replicated", "grid", "autopipe", "pipedream", "dapple", "spp", "pipeplan")
"""In the order of README's table."""


def command(name: str) -> list[str]:
    """The words of the one command of README that plans or compares on the irregular cluster."""
    (line,) = (
        line
        for text in snippets(README, "sh")
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith(f"pipeplan {name} ") and "irregular.toml" in line
    )
    return shlex.split(line)[1:]


def run(words: list[str], folder: Path) -> str:
    program = [warm_python(), "-m", "planner.cli"]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def cells(text: str) -> list[str]:
    """The figures of README's table of planners."""
    table = re.search(r"^\| even split \|.*\n\|[-|]+\n\| (.+) \|$", text, re.MULTILINE)
    assert table is not None
    return [cell.strip("* ") for cell in table[1].split("|")]


@pytest.mark.extensive
def test_the_commands_of_the_front_page_print_its_figures(tmp_path: Path) -> None:
    text = README.read_text()
    assert "--deterministic" in command("plan")
    assert "--deterministic" in command("compare")
    run(command("plan"), tmp_path)
    predicted = load_plan(tmp_path / "plan.json").predicted
    ours, bound = (format_seconds(s) for s in (predicted.iteration_time_s, predicted.lower_bound_s))
    gap = f"{100 * (predicted.iteration_time_s / predicted.lower_bound_s - 1):.2f} %"
    printed = run([*command("compare"), "--json"], tmp_path)
    times = {row["planner"]: format_seconds(row["iteration_time_s"]) for row in rows(printed)}
    best = load_plan(tmp_path / "best_baseline.json").predicted.iteration_time_s
    assert times["pipeplan"] == ours
    assert cells(text) == [times[name].removesuffix(" ms") for name in PLANNERS]
    same = f"Bottom: Pipeplan's plan for the same cluster, {ours}]"
    for said in (
        f"iteration time {format_seconds(best)}.",
        f"on one node, {format_seconds(best)}. {same}",
        f"Bottom: Pipeplan's plan, {ours}, at most {gap} above the proved lower bound of {bound}.",
    ):
        assert said in text, said


def rows(printed: str) -> list[dict]:
    return json.loads(printed)
