"""``pipeplan export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import completion
from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import print_json, user_errors

if TYPE_CHECKING:
    from planner.export.exported import Exported


def export(
    path: PlanArgument,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TOOL",
            help="torch-csv, torchtitan, megatron or deepspeed",
            autocompletion=completion.export_targets,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="folder to write into")
    ] = Path("export"),
    as_json: JsonOption = False,
) -> None:
    """Write a plan for the tool you train with; refused, with the reasons, if it cannot run it."""
    with user_errors(as_json):
        from planner.artifacts.document import require_file_path
        from planner.artifacts.plan import Plan
        from planner.export.targets import export_plan
        from planner.verifier import require_valid

        the_plan = Plan.load(path)
        require_valid(the_plan)
        exported = export_plan(the_plan, target)
        for name in exported.files:
            require_file_path(output / name)
        written = _write(exported, output)
        if as_json:
            notes, use = list(exported.notes), list(exported.use)
            print_json({"to": target, "files": written, "use": use, "notes": notes})
        else:
            _show(exported, written)


def _write(exported: Exported, folder: Path) -> list[str]:
    from planner.artifacts.document import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    for name, text in exported.files.items():
        write_atomically(folder / name, text)
    return [str(folder / name) for name in exported.files]


def _show(exported: Exported, written: list[str]) -> None:
    for note in exported.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {', '.join(written)}")
    for line in exported.use:
        typer.echo(line)
