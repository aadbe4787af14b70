"""``pipeplan calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli import completion
from planner.cli.options import JsonOption, PlanArgument
from planner.cli.output import named, print_json, print_rich, user_errors
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan

_SUFFIXES = {"--graph": (".json",), "--cluster": (".toml", ".json")}
"""Of options whose file is read by its name."""


MeasuredArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MEASURED",
        help="timeline that the executor wrote (--timeline)",
        autocompletion=completion.plans,
    ),
]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="calibrated plan to write")]
GraphOption = Annotated[
    Path | None,
    typer.Option(
        "--graph", help="write its layer graph too (JSON), for `pipeplan plan MODEL --costs`"
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", help="write its cluster too, by its name as TOML or JSON"),
]
LinksOnlyOption = Annotated[
    bool, typer.Option("--links-only", help="leave the layers' times as they are")
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
    """Turn a run's measured times into the costs that plans are made from."""
    with user_errors(as_json):
        from planner.artifacts.measured import MeasuredTimeline
        from planner.artifacts.plan import Plan
        from planner.calibration.calibrate import calibrate as calibrated
        from planner.report.calibration import calibration_data, calibration_tables

        _check_outputs([path, measured], output, graph, cluster)
        plan, timeline = Plan.load(path), MeasuredTimeline.load(measured)
        with named(measured):
            result = calibrated(plan, timeline, links_only=links_only)
        _write(result.plan, output, graph, cluster)
        if as_json:
            print_json({"plan": str(output), **calibration_data(result)})
            return
        print_rich(calibration_tables(result))
        for written in (output, graph, cluster):
            if written is not None:
                typer.echo(f"wrote {written}")


def _check_outputs(
    inputs: list[Path], output: Path, graph: Path | None, cluster: Path | None
) -> None:
    """Refuse what cannot be written, or would be written over another file of the command."""
    from planner.artifacts.document import require_file_path

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
            raise PipeplanError(f"{option} {path}: is another file of this command; choose another")
        taken.add(path.resolve())


def _write(plan: Plan, output: Path, graph: Path | None, cluster: Path | None) -> None:
    plan.save(output)
    if graph is not None:
        plan.problem.graph.save(graph)
    if cluster is not None:
        plan.cluster.save(cluster)
