"""``pipeplan export``: a plan as files of another tool."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import print_json, say, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.interop.exported import Exported


def export(
    path: PlanArgument,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TOOL",
            help="torch-csv, torchtitan, megatron or deepspeed",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="folder to write, created if missing (default: export/TOOL)",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace files of an earlier export")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a plan to torch, torchtitan, Megatron-LM or DeepSpeed, or say why that fails."""
    with user_errors(as_json):
        from planner.interop.exported import export_plan
        from planner.prediction import load_plan
        from planner.verification import require_valid

        the_plan = load_plan(path)
        require_valid(the_plan, str(path))
        exported = export_plan(the_plan, target)
        folder = output or Path("export") / target
        written = _write(exported, folder, overwrite=overwrite)
        use = exported.use_in(folder)
        if as_json:
            notes = list(exported.notes)
            print_json({"to": target, "files": written, "use": list(use), "notes": notes})
        else:
            _show(exported, written, use)


def _write(exported: Exported, folder: Path, *, overwrite: bool) -> list[str]:
    """Write all files, or none if one of them cannot be written."""
    from planner.records.document import require_file_path, write_atomically

    paths = [folder / name for name in exported.files]
    _make(folder)
    for path, text in zip(paths, exported.files.values(), strict=True):
        require_file_path(path)
        if not overwrite and path.exists() and path.read_bytes() != text.encode():
            raise PipeplanError(
                f"{path}: exists with different contents; choose another folder (-o) or add "
                f"--overwrite"
            )
    for path, text in zip(paths, exported.files.values(), strict=True):
        write_atomically(path, text)
    return list(map(str, paths))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipeplanError(
            f"--output {folder}: cannot create the folder: {error.strerror}; give another"
        ) from None


def _show(exported: Exported, written: list[str], use: Iterable[str]) -> None:
    for note in exported.notes:
        say(f"note: {note}")
    say(f"wrote {', '.join(written)}")
    for line in use:
        say(line)
