"""Every command runs once where only the wheel is installed, outside of a checkout."""

from __future__ import annotations

import json
import shlex
import socket
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest
from installed import Installed

pytestmark = pytest.mark.extensive

LEAVES = """
import json, typer
from planner.cli.commands import app

def leaves(command, path=()):
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path)

print(json.dumps(list(leaves(typer.main.get_command(app)))))
"""
TOPOLOGY = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV4\tPIX\nGPU1\tNV4\t X \tSYS\nNIC0\tPIX\tSYS\t X \n"
STAGES = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
SEARCH = "--time-limit 1 --deterministic"
STEPS = (
    ("import", "import topo.txt --device-type A6000 -o a.toml"),
    ("detect", "detect --ranks 2 --no-compute --no-together --no-all-reduce -o here.toml"),
    ("trace", "trace my_net:build --job job.toml -o net.json"),
    (
        "profile",
        "profile my_net:build --job job.toml --device cpu --threads 1 --samples 2 "
        "--seconds 0 -o costs.json",
    ),
    ("plan", f"plan my_net:build --cluster cluster.toml --job job.toml {SEARCH} -o plan.json"),
    (
        "adopt",
        "adopt my_net:build --cluster cluster.toml --job job.toml --stages stages.json "
        "--schedule 1f1b -o two.json",
    ),
    (
        "adopt",
        "adopt my_net:build --cluster cluster.toml --job copies.toml --stages whole.json "
        "--replicas 2 -o copies.json",
    ),
    ("executor", "two.json --model my_net:build --data random --steps 3 --timeline timeline.json"),
    ("executor.coordinator", "copies.json --model my_net:build --data random"),
    ("compare", "compare my_net:build --cluster cluster.toml --job job.toml --time-limit 1"),
    (
        "sweep",
        f"sweep my_net:build --cluster cluster.toml --job job.toml --microbatches 2,4 "
        f"{SEARCH} -o points",
    ),
    ("replan", f"replan two.json --lost here/gpu1 {SEARCH} -o smaller.json"),
    ("verify", "verify two.json"),
    ("simulate", "simulate two.json --against timeline.json"),
    ("explain", "explain two.json --apply 'begin stage 1 at layers.1' -o edited.json"),
    ("report", "report two.json -o two.html"),
    ("export", "export two.json --to torch-csv -o export"),
    ("verify", "verify --schema plan"),
)
"""Commands in an order in which each has what it reads."""


def torchrun(installed: Installed, ranks: int, *words: str) -> CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", ranks)
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return installed.run(*launcher, *rendezvous, "-m", "executor", *words)


def coordinated(installed: Installed, *words: str) -> CompletedProcess[str]:
    """Run the coordinator and two pipelines of one rank; return what failed, else the first."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    plan, *options = words
    sync = ("--steps", "2", "--sync", "semi_decentralized")
    with ThreadPoolExecutor() as pool:
        server = ("-m", "executor.coordinator", plan, "--listen", address, *sync)
        runs = [pool.submit(installed.run, *server)]
        for number in ("0", "1"):
            joined = ("--pipeline", number, "--coordinator", address)
            runs.append(pool.submit(torchrun, installed, 1, plan, *options, *joined, *sync))
        done = [run.result() for run in runs]
    return next((one for one in done if one.returncode), done[0])


def test_every_command_has_a_step(installed: Installed) -> None:
    told = installed.run("-c", LEAVES)
    assert told.returncode == 0, told.stderr
    assert set(json.loads(told.stdout)) <= {name for name, _ in STEPS}


def test_every_command_runs_once(installed: Installed) -> None:
    folder = installed.folder
    (folder / "topo.txt").write_text(TOPOLOGY)
    (folder / "stages.json").write_text(json.dumps(STAGES))
    (folder / "whole.json").write_text(json.dumps([[*STAGES[0], *STAGES[1]]]))
    job = (folder / "job.toml").read_text()
    (folder / "copies.toml").write_text(job.replace("replication = false", "replication = true"))
    failed = {}
    for name, words in STEPS:
        if name == "executor.coordinator":
            done = coordinated(installed, *shlex.split(words))
        elif name == "executor":
            done = torchrun(installed, 2, *shlex.split(words))
        else:
            done = installed.pipeplan(*shlex.split(words))
        if done.returncode != 0 or "Traceback" in done.stderr:
            failed[words] = f"{done.returncode}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert not failed, "\n\n".join(f"{words}\n{output}" for words, output in failed.items())
