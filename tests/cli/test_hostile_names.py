"""Names from files are shown on terminals and cannot command them, whatever the encoding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import cluster, graph, layer, link, orders, pipeline
from commands import ROOT, pipeplan

from planner.assembly import plan_by_hand
from planner.errors import printable
from planner.model.graph_record import GraphRecord, graph_digest

NAMES = {"a": "a\x1b[31m", "b": "b\x1b]0;title\x07", "by-hand": "m\x9b2J\u202e\u2028µ…"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A plan whose layers and model have names with commands for a terminal."""
    machines = cluster(["d0", "d1"], [link("d0", "d1")])
    # A single change helps: the last layer of the first stage is better off in the second.
    layers = graph([layer("a"), layer("b"), layer("c", 0.1, 0.2)])
    placed = pipeline(layers, machines, [(["a", "b"], ["d0"]), (["c"], ["d1"])])
    made = plan_by_hand(placed, orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1"))
    text = json.dumps(json.loads(made.model_dump_json()))
    for name, hostile in NAMES.items():
        text = text.replace(json.dumps(name), json.dumps(hostile))
    data = json.loads(text)
    data["model"]["graph_digest"] = graph_digest(GraphRecord.parse(data["model"]["graph"], "graph"))
    found = tmp_path / "plan.json"
    found.write_text(json.dumps(data))
    return found


@pytest.mark.parametrize("command", ["verify", "simulate", "explain"])
def test_commands_in_names_do_not_reach_the_terminal(path: Path, command: str) -> None:
    found = pipeplan(command, path)
    assert found.exit_code == 0
    assert found.output == printable(found.output)


def test_nor_do_those_of_a_change(path: Path) -> None:
    move = f"begin stage 1 at {NAMES['b']}"
    shown = printable(move)
    # A table cuts what is long.
    assert shown[:18] in pipeplan("explain", path).output
    found = pipeplan("explain", path, "--apply", move, "-o", path.with_name("new.json"))
    assert found.exit_code == 0
    assert shown in found.output
    assert found.output == printable(found.output)


def test_errors_and_notes_show_names_too(path: Path) -> None:
    data = json.loads(path.read_text())
    data["stages"][0]["layers"].append("\x1b[2Jx")
    path.write_text(json.dumps(data))
    found = pipeplan("verify", path)
    assert found.exit_code == 1
    assert "\x1b" not in found.output
    assert r"unknown layer '\x1b[2Jx'" in found.output


def test_text_that_prints_stays_as_it_is() -> None:
    text = "layer 'h.0'\t1.5 µs …\n"
    assert printable(text) == text
    assert printable("a\x1b[2J\x7f\x9b\u202e\r") == r"a\x1b[2J\x7f\x9b\u202e\r"


def test_a_terminal_of_few_characters_gets_no_traceback() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "detect", "--presets"],
        env=env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert rb"\xb5s" in done.stdout
