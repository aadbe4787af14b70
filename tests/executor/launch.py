"""Starting torchrun from a test."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(*folders: Path, **extra: str) -> dict[str, str]:
    """Of a process that imports this copy of Pipeplan, and modules in these folders."""
    path = os.pathsep.join(map(str, (ROOT, *folders)))
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def start(
    ranks: int, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start ``torchrun`` on this machine at a port that is free, in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), *arguments],
        cwd=ROOT,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def torchrun(
    ranks: int, *arguments: str, timeout_s: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun`` to its end."""
    running = start(ranks, *arguments, env=env)
    try:
        out, error = running.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(running.args, running.returncode, out, error)
