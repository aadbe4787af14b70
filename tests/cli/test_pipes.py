"""What is printed into a pipe is plain text, without the escape codes of terminals."""

import os
import subprocess
from pathlib import Path

from commands import ROOT

# Those that ask for colours wherever it goes.
FORCED = {"FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "GITHUB_ACTIONS"}
OUTSIDE = {name: value for name, value in os.environ.items() if name not in FORCED}


def printed(*command: str, **environment: str) -> str:
    """What a program writes to a pipe, by both streams."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**OUTSIDE, "TERM": "xterm-256color", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_demo_adds_no_escape_codes_of_its_own(tmp_path: Path) -> None:
    for name in ("pipeplan", "torchrun", "python"):
        (tmp_path / name).write_text("#!/bin/sh\necho it ran\n")
        (tmp_path / name).chmod(0o755)
    out = printed("sh", "examples/demo.sh", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert out.count("it ran") == 9
    assert "\x1b" not in out
