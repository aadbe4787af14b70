"""``pipeplan migrate``: files of older formats in the newest format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli.options import JsonOption
from planner.cli.output import print_json, say, user_errors
from planner.errors import PipeplanError

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="any Pipeplan file",
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="file to write (default: FILE itself)")
]


def migrate(file: FileArgument, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Rewrite a file in the newest format."""
    with user_errors(as_json):
        from planner.records.document import require_file_path
        from planner.records.formats import check_format, newest_format

        target = output or file
        require_file_path(target)
        data = _data(file)
        newest = newest_format(data.get("format"), str(file))
        if target.exists() and not target.samefile(file):
            raise PipeplanError(
                f"--output {target}: already exists; choose another name or remove it"
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
            say(f"wrote {target} ({data['format']} -> {newest})")
        else:
            say(f"{file}: {newest} is the newest format; nothing to do")


_OF_THE_EXECUTOR = ("pipeplan-train/", "pipeplan-checkpoint/")
"""Kinds that only the executor reads whole."""


def _data(path: Path) -> dict[str, Any]:
    from planner.records.document import MOST_MEASURED_OBJECTS, read_json, read_toml

    is_toml = path.suffix.lower() == ".toml"
    data = read_toml(path) if is_toml else read_json(path, most_objects=MOST_MEASURED_OBJECTS)
    if not isinstance(data, dict):
        raise PipeplanError(f"{path}: expected an object with a field 'format'; name another file")
    return data


def _rewrite(data: dict[str, Any], newest: str, file: Path, target: Path) -> bool:
    """Load the file; write it if its contents changed or it goes to another path."""
    load = _loaders().get(newest.rpartition("/")[0])
    record = None if load is None else load(file)
    if data["format"] != newest or _is_predicted_anew(data, record):
        assert record is not None, "kinds of the executor have no older formats"
        _save(record, target)
        return True
    if target.resolve() == file.resolve():
        return False
    from planner.records.document import write_atomically

    write_atomically(target, file.read_bytes())
    return True


def _save(record: Any, target: Path) -> None:
    from planner.plan.plan import Plan
    from planner.verification import save_valid

    if isinstance(record, Plan):
        save_valid(record, target)
    else:
        record.save(target)


def _is_predicted_anew(data: dict[str, Any], record: Any) -> bool:
    from planner.plan.plan import Plan

    if not isinstance(record, Plan):
        return False
    return bool(data["provenance"]["cost_model"] != record.provenance.cost_model)


def _loaders() -> dict[str, Callable[[Path], Any]]:
    """Return the loader of each kind of file."""
    from planner.cluster.cluster import Cluster
    from planner.job import Job
    from planner.measured.sync_trace import SyncTrace
    from planner.measured.timeline import MeasuredTimeline
    from planner.model.layer_graph import LayerGraph
    from planner.model.measured_costs import Costs
    from planner.plan.moves import Moves
    from planner.plan.sweep_index import SweepIndex
    from planner.prediction import load_plan

    return {
        "pipeplan": load_plan,
        "pipeplan-graph": LayerGraph.load,
        "pipeplan-cluster": Cluster.load,
        "pipeplan-job": Job.load,
        "pipeplan-timeline": MeasuredTimeline.load,
        "pipeplan-costs": Costs.load,
        "pipeplan-sync-trace": SyncTrace.load,
        "pipeplan-sweep": SweepIndex.load,
        "pipeplan-moves": Moves.load,
    }
