"""``pipeplan replan``: go on with a training on the machines that are left, or came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption, PlanArgument, SeedOption, WorkersOption
from planner.cli.output import print_json, print_rich, show_plan, user_errors
from planner.errors import PipeplanError
from planner.solver_settings import DEFAULT_WORKERS

if TYPE_CHECKING:
    from planner.replanning import Replanned

OutputOption = Annotated[Path, typer.Option("-o", "--output", help="plan file to write")]
LostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lost",
        metavar="DEVICE",
        help="a device that is gone, or a node with all of its devices; may be repeated",
    ),
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="DEVICE:FACTOR",
        help="a device or node that takes so many times as long; may be repeated",
    ),
]
AddedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--added",
        metavar="FILE|NAME=LIKE",
        help="a cluster file of devices and links that came, or a device or node with the type "
        "and links of another, as n1/gpu3=n1/gpu2; may be repeated",
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="all machines there are now (TOML or JSON), in place of --lost and --added",
    ),
]
SlackOption = Annotated[
    float,
    typer.Option(
        "--slack",
        metavar="SHARE",
        help="take a plan that is slower than the fastest found by at most this share, if it "
        "moves fewer bytes",
    ),
]
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="of the search, reading and writing aside"
    ),
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="the same plan on every run and machine")
]
MovesOption = Annotated[
    Path | None,
    typer.Option("--moves", metavar="FILE", help="write what moves from where to where as JSON"),
]


def replan(
    path: PlanArgument,
    output: OutputOption,
    lost: LostOption = None,
    slow: SlowOption = None,
    added: AddedOption = None,
    cluster: ClusterOption = None,
    slack: SlackOption = 0.05,
    time_limit: TimeLimitOption = 2.5,
    moves: MovesOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan anew for the machines that are left or came, and keep in place what can stay."""
    with user_errors(as_json):
        from planner.artifacts.cluster import Cluster
        from planner.artifacts.plan import Plan
        from planner.replanning import parse_added, parse_slow
        from planner.replanning import replan as replan_plan
        from planner.verifier import require_valid

        additions = [parse_added(text) for text in added or ()]
        files = [addition for addition in additions if isinstance(addition, Path)]
        _require_outputs(output, moves, [path, cluster, *files])
        old = Plan.load(path)
        require_valid(old, str(path))
        found = replan_plan(
            old,
            lost=lost or (),
            slow=[parse_slow(text) for text in slow or ()],
            added=additions,
            cluster=None if cluster is None else Cluster.load(cluster),
            slack=slack,
            time_limit_s=time_limit,
            seed=seed,
            workers=workers,
            deterministic=deterministic,
        )
        found.plan.save(output)
        if moves is not None:
            found.moves.save(moves)
        _show(found, output, moves, as_json=as_json)


def _require_outputs(output: Path, moves: Path | None, inputs: Sequence[Path | None]) -> None:
    """What can be wrong with files that will be written is told before the search."""
    from planner.artifacts.document import require_file_path

    for option, path in (("--output", output), ("--moves", moves)):
        if path is None:
            continue
        require_file_path(path)
        for source in filter(None, inputs):
            if path.resolve() == source.resolve():
                raise PipeplanError(
                    f"{option} {path}: is a file the plan is made from; training may still need "
                    "it, choose another name"
                )
    if moves is not None and moves.resolve() == output.resolve():
        raise PipeplanError(f"--moves {moves}: the plan is written there; choose another name")


def _show(found: Replanned, output: Path, moves: Path | None, *, as_json: bool) -> None:
    from planner.report.replanning import (
        alternatives_table,
        moves_table,
        replanned_data,
        replanned_lines,
    )

    if as_json:
        print_json({"plan": str(output), **replanned_data(found)})
        return
    show_plan(found.plan)
    print_rich(alternatives_table(found))
    table = moves_table(found.moves)
    if table is not None:
        print_rich(table)
    for line in replanned_lines(found):
        typer.echo(line)
    for note in found.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {output}" + (f" and {moves}" if moves is not None else ""))
    _tell_command(found, output)


def _tell_command(found: Replanned, output: Path) -> None:
    from planner.run_command import resume_command

    command = resume_command(found.plan, output)
    if command is not None:
        typer.echo(
            f"to go on from the last checkpoint on one host, with the options that training had: "
            f"{command}"
        )
