"""``pipeplan profile``: the executor measures, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import typer


def profile(context: typer.Context) -> None:
    """Measure what each layer of a model costs on this device (--help: all options)."""
    # The executor needs nothing of the planner's command line, and GPU machines may not have it.
    command = [sys.executable, "-m", "executor.profiling", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
