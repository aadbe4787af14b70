"""Starting torchrun from a test."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]


def environment(*folders: Path, **extra: str) -> dict[str, str]:
    """Of a process that imports this copy of Pipeplan, and modules in these folders."""
    path = os.pathsep.join(map(str, (ROOT, *folders)))
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def start(
    ranks: int, *arguments: str, env: Mapping[str, str] | None = None, python: str = sys.executable
) -> subprocess.Popen[str]:
    """Start ``torchrun`` on this machine at a port that is free, in a process group of its own."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment_ = {**(env or environment()), "PYTHON_EXEC": python}  # Of the ranks.
    return _process([python, *command, *arguments], environment_)


def torchrun(
    ranks: int, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun`` to its end; it and its ranks share imports."""
    return _to_its_end(start(ranks, *arguments, env=env, python=warm_python()))


def forked(
    ranks: int, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run what ``torchrun`` would, to its end, in ranks that share imports and exports."""
    program = str(Path(__file__).with_name("forked_ranks.py"))
    return _to_its_end(_process([warm_python(), program, str(ranks), *arguments], env))


def _process(command: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _to_its_end(running: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, error = running.communicate()
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(running.args, running.returncode, out, error)
