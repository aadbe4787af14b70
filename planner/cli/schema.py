"""``pipeplan schema``: JSON Schemas of files, for editors and other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from planner.cli import completion
from planner.cli.output import user_errors
from planner.errors import PipeplanError, shorten

KINDS = ("plan", "graph", "cluster", "job", "costs", "sweep", "sync-trace", "moves", "train")


def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help=", ".join(KINDS), autocompletion=completion.one_of(*KINDS)
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write, default to print it")
    ] = None,
) -> None:
    """Print the JSON Schema of a kind of file: its fields, types, ranges, units and meanings."""
    with user_errors():
        from planner.artifacts.document import write_atomically

        if kind not in KINDS:
            raise PipeplanError(f"KIND: no schema of {shorten(kind)}; there are {', '.join(KINDS)}")
        text = _text(kind)
        if output is None:
            typer.echo(text, nl=False)
        else:
            write_atomically(output, text)
            typer.echo(f"wrote {output}")


def _text(kind: str) -> str:
    from planner.artifacts.schemas import ARTIFACTS, schema_text

    if kind in ARTIFACTS:
        return schema_text(ARTIFACTS[kind])
    # A training file is the executor's, which the planner does not import.
    command = [sys.executable, "-m", "executor.train_schema"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
