"""The tools that `make peers` installs: programs that import them, or a skipped test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import ROOT

PEERS = ROOT / ".peers"


def require_peer(package: str) -> None:
    """Skip a test whose package is not installed; its program is started by another process."""
    if not (PEERS / package).is_dir():
        pytest.skip(f"{package} is not in .peers: run `make peers`")


def import_from_peers(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let this process import a package; skip the test without it."""
    require_peer(package)
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEERS)])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def peer_environment(*more: Path) -> dict[str, str]:
    """Return what lets a program import the tools, the project and folders of its own."""
    return {
        "PYTHONPATH": ":".join(map(str, (ROOT, *more, PEERS))),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def ask_peer(program: Path, question: Any) -> Any:
    """Run a program that reads JSON and writes its answer, JSON, as its last line."""
    done = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(question),
        env={**os.environ, **peer_environment(program.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
