"""``pipeplan calibrate``: costs of layers and links from a measured run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import named, print_json, say, show, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.plan.plan import Plan

_SUFFIXES = {"--graph": (".json",), "--cluster": (".toml", ".json")}
"""Options whose file is read by its name."""


MeasuredArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MEASURED",
        help="measured timeline (from the executor's --timeline)",
    ),
]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="calibrated plan to write")]
GraphOption = Annotated[
    Path | None,
    typer.Option(
        "--graph", help="also write its layer graph (JSON), for `pipeplan plan MODEL --costs`"
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", help="also write its cluster (TOML or JSON, by file name)"),
]
LinksOnlyOption = Annotated[
    bool, typer.Option("--links-only", help="calibrate links only and keep the layers' times")
]


def calibrate(
    path: PlanArgument,
    measured: MeasuredArgument,
    output: OutputOption,
    graph: GraphOption = None,
    cluster: ClusterOption = None,
    links_only: LinksOnlyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Derive costs of layers and links from a measured run."""
    with user_errors(as_json):
        from planner.interop.calibrate.calibrate import calibrate as calibrated
        from planner.measured.timeline import MeasuredTimeline
        from planner.prediction import load_plan
        from planner.report.deviation import calibration_data, calibration_view

        _check_outputs([path, measured], output, graph, cluster)
        plan, timeline = load_plan(path), MeasuredTimeline.load(measured)
        with named(measured):
            result = calibrated(plan, timeline, links_only=links_only)
        _write(result.plan, output, graph, cluster)
        if as_json:
            print_json({"plan": str(output), **calibration_data(result)})
            return
        show(*calibration_view(result))
        for written in (output, graph, cluster):
            if written is not None:
                say(f"wrote {written}")


def _check_outputs(
    inputs: list[Path], output: Path, graph: Path | None, cluster: Path | None
) -> None:
    """Refuse what cannot be written, or would be written over another file of the command."""
    from planner.records.document import require_file_path

    named = {"--output": output, "--graph": graph, "--cluster": cluster}
    given = {option: path for option, path in named.items() if path is not None}
    taken = {path.resolve() for path in inputs[1:]}
    for option, path in given.items():
        require_file_path(path)
        suffixes = _SUFFIXES.get(option)
        if suffixes and path.suffix not in suffixes:
            expected = " or ".join(suffixes)
            raise PipeplanError(f"{option} {path}: expected a name that ends in {expected}")
        if path.resolve() in taken or (
            option != "--output" and path.resolve() == inputs[0].resolve()
        ):
            raise PipeplanError(
                f"{option} {path}: used for another file of this command; choose another name"
            )
        taken.add(path.resolve())


def _write(plan: Plan, output: Path, graph: Path | None, cluster: Path | None) -> None:
    from planner.verification import save_valid

    save_valid(plan, output)
    if graph is not None:
        plan.single_device_problem.graph.save(graph)
    if cluster is not None:
        plan.cluster.save(cluster)
