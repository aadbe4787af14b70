"""Every command that reads a file, given files that are none of it: an error line, no traceback."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from commands import pipeplan
from link_files import topology
from transformers_by_hand import machines, problem, transformer

from planner import adopt

pytestmark = pytest.mark.extensive
CLUSTER = """
format = "pipeplan-cluster/1"

[[nodes]]
name = "here"
devices = 2
type = "CPU-core"
link = "loopback"
"""
JOB = 'format = "pipeplan-job/1"\nmicrobatches = 4\nreplication = false\n'
KINDS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 4,
    "not UTF-8": 'x = "é"'.encode("latin-1"),
    "an array": b"[1, 2]",
    "a string": b'"x"',
    "null": b"null",
    "NaN": b'{"format": NaN, "microbatches": Infinity}',
    "half a surrogate": b'{"format": "\\ud800"}',
    "a field twice": b'{"format": "a", "format": "b"}',
    "nested deeply": b"[" * 100_000,
    "a long number": b'{"a": 1' + b"0" * 5000 + b"}",
    "a page of the web": b"<html><body>404 not found</body></html>",
}
C = "--cluster cluster.toml --job job.toml"
PLAN = "--time-limit 0.2 -o out.json"
COMMANDS = (
    "trace {json} -o out.json",
    "trace {json} --job {toml} -o out.json",
    f"plan {{json}} {C} {PLAN}",
    f"plan graph.json --cluster {{toml}} --job job.toml {PLAN}",
    f"plan graph.json --cluster cluster.toml --job {{json}} {PLAN}",
    f"plan graph.json {C} --costs {{json}} {PLAN}",
    f"plan graph.json {C} --warm-start {{json}} {PLAN}",
    f"adopt graph.json {C} --stages {{json}} -o out.json",
    f"adopt graph.json {C} --stages stages.json --schedule {{csv}} -o out.json",
    f"adopt graph.json {C} --layout megatron:{{sh}} -o out.json",
    f"adopt graph.json {C} --layout torchtitan:{{toml}} -o out.json",
    "import {txt} --device-type A10 -o out.json",
    "import {txt} --from nvidia-smi --device-type A10 -o out.toml",
    "import {txt} --from rocm-smi --device-type MI210 -o out.toml",
    "import {txt} --from nccl-topology --device-type A10 -o out.toml",
    "import {txt} --from nccl-tests -o out.toml",
    "import topo.txt --device-type {toml}:A -o out.toml",
    "import {toml} cluster.toml --network 100gbit -o out.toml",
    "plan {json} -o out.json --time-limit 0.2",
    f"compare {{json}} {C} --time-limit 0.2",
    "sweep graph.json --cluster {toml} --time-limit 0.2 -o out",
    "replan {json} --lost {lost} -o out.json",
    "replan plan.json --cluster {json} -o out.json",
    "replan plan.json --cluster {toml} -o out.json",
    "verify {json}",
    "simulate {json}",
    "simulate plan.json --against {json}",
    "simulate plan.json --sync all_reduce --iterations 3 --sync-trace {json}",
    "profile plan.json {json} -o out.json",
    "profile {json} plan.json -o out.json",
    "explain {json}",
    "explain {json} --apply 'reschedule all stages' -o out.json",
    "report {json} -o out.png",
    "report {json} -o out.html",
    "export {json} --to torch-csv -o out",
)


SUFFIXES = ("json", "toml", "txt", "csv", "sh")
UNREADABLE = ("missing", "a folder", "a link to itself", "x" * 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are right, and beside them those of every kind with every suffix."""
    found = tmp_path_factory.mktemp("files")
    plan = adopt(problem(transformer(4), machines(2), microbatches=4), "Et*2|t*2L")
    plan.save(found / "plan.json")
    plan.problem.graph.save(found / "graph.json")
    (found / "stages.json").write_text(json.dumps([list(s.layers) for s in plan.stages]))
    (found / "cluster.toml").write_text(CLUSTER)
    (found / "job.toml").write_text(JOB)
    (found / "topo.txt").write_text(topology(["X PIX", "PIX X"]))
    for suffix in SUFFIXES:
        for kind, data in KINDS.items():
            (found / f"{kind}.{suffix}").write_bytes(data)
        (found / f"a folder.{suffix}").mkdir()
        (found / f"a link to itself.{suffix}").symlink_to(f"a link to itself.{suffix}")
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_file_is_told_in_an_error_that_names_it(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    lost = json.loads(Path("plan.json").read_text())["cluster"]["devices"][0]["name"]
    for kind in (*KINDS, *UNREADABLE):
        names = {suffix: f"{kind}.{suffix}" for suffix in SUFFIXES}
        words = [word.format(lost=lost, **names) for word in shlex.split(command)]
        made = pipeplan(*words)
        assert made.exit_code in (1, 2), (words, made.output)
        lines = made.stderr.splitlines()
        if made.exit_code == 1:
            assert any(line.startswith("error: ") and kind[:50] in line for line in lines), lines
        assert made.stdout == ""
        assert not any(path.name.startswith("out") for path in folder.iterdir()), words


WRONG_VALUES = ("nan", "-inf", "-1", "abc", "")
NUMBERS = (
    f"plan graph.json {C} -o out.json --time-limit",
    f"plan graph.json {C} -o out.json --time-limit 0.2 --workers",
    f"adopt graph.json {C} --stages stages.json -o out.json --replicas",
    f"adopt graph.json {C} --stages stages.json -o out.json --pipeline-size",
    "sweep graph.json --cluster cluster.toml -o out --microbatches",
    "replan plan.json --lost {lost} -o out.json --slack",
    "simulate plan.json --seeds",
    "import cluster.toml cluster.toml --network 100gbit -o out.toml --latency-us",
    "trace models.gpt:gpt_tiny -o out.json --split",
)


@pytest.mark.parametrize("command", NUMBERS)
def test_a_wrong_number_is_told(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    lost = json.loads(Path("plan.json").read_text())["cluster"]["devices"][0]["name"]
    for value in WRONG_VALUES:
        made = pipeplan(*command.format(lost=lost).split(), value)
        assert made.exit_code in (1, 2), (value, made.output)
        assert made.stderr.strip()
        assert not any(path.name.startswith("out") for path in folder.iterdir()), value
