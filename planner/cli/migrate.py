"""``pipeplan migrate``: files of older formats in the newest one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli import completion
from planner.cli.options import JsonOption
from planner.cli.output import print_json, user_errors
from planner.errors import PipeplanError

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="any file of Pipeplan, whatever its kind",
        autocompletion=completion.artifacts,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="file to write; FILE itself unless given")
]


def migrate(file: FileArgument, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Rewrite a file of an older format in the newest one."""
    with user_errors(as_json):
        from planner.artifacts.document import require_file_path
        from planner.artifacts.formats import check_format, newest_format

        target = output or file
        require_file_path(target)
        data = _data(file)
        newest = newest_format(data.get("format"), str(file))
        if target.exists() and not target.samefile(file):
            raise PipeplanError(
                f"--output {target}: is there already; choose another name, or remove it first"
            )
        if newest.startswith(_OF_THE_EXECUTOR):
            check_format(data, newest, str(file))
        written = _rewrite(data, newest, file, target)
        report = {
            "file": str(file),
            "from": data["format"],
            "to": newest,
            "written": str(target) if written else None,
        }
        if as_json:
            print_json(report)
        elif written:
            typer.echo(f"wrote {target} ({data['format']} -> {newest})")
        else:
            typer.echo(f"{file}: {newest} is the newest format; nothing to do")


_OF_THE_EXECUTOR = ("pipeplan-train/", "pipeplan-checkpoint/")
"""Kinds that only the executor reads whole."""


def _data(path: Path) -> dict[str, Any]:
    from planner.artifacts.document import read_json, read_toml

    data = read_toml(path) if path.suffix.lower() == ".toml" else read_json(path)
    if not isinstance(data, dict):
        raise PipeplanError(f"{path}: expected an object with a field 'format'; name another file")
    return data


def _rewrite(data: dict[str, Any], newest: str, file: Path, target: Path) -> bool:
    """Read the file as what it is; write it if that changed anything, or it is to lie elsewhere."""
    load = _loaders().get(newest.rpartition("/")[0])
    record = None if load is None else load(file)
    if data["format"] != newest or _is_predicted_anew(data, record):
        assert record is not None, "kinds of the executor have no older formats"
        record.save(target)
        return True
    if target.resolve() == file.resolve():
        return False
    from planner.artifacts.document import write_atomically

    write_atomically(target, file.read_bytes())
    return True


def _is_predicted_anew(data: dict[str, Any], record: Any) -> bool:
    from planner.artifacts.plan import Plan

    if not isinstance(record, Plan):
        return False
    return bool(data["provenance"]["cost_model"] != record.provenance.cost_model)


def _loaders() -> dict[str, Callable[[Path], Any]]:
    """By the kind of file: what reads it."""
    from planner.artifacts.cluster import Cluster
    from planner.artifacts.costs import Costs
    from planner.artifacts.job import Job
    from planner.artifacts.layer_graph import LayerGraph
    from planner.artifacts.measured import MeasuredTimeline
    from planner.artifacts.moves import Moves
    from planner.artifacts.plan import Plan
    from planner.artifacts.sweep import SweepIndex
    from planner.artifacts.sync_trace import SyncTrace

    return {
        "pipeplan": Plan.load,
        "pipeplan-graph": LayerGraph.load,
        "pipeplan-cluster": Cluster.load,
        "pipeplan-job": Job.load,
        "pipeplan-timeline": MeasuredTimeline.load,
        "pipeplan-costs": Costs.load,
        "pipeplan-sync-trace": SyncTrace.load,
        "pipeplan-sweep": SweepIndex.load,
        "pipeplan-moves": Moves.load,
    }
