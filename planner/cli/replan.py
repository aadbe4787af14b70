"""``pipeplan replan``: a new plan after devices were lost, slowed or added."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    DeterministicOption,
    JsonOption,
    PlanArgument,
    PlanOutputOption,
    RunByOption,
    TimeLimitOption,
)
from planner.cli.output import print_json, require_outputs, show, show_plan, user_errors

if TYPE_CHECKING:
    from planner.replanning.replan import Replanned

LostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lost",
        metavar="DEVICE",
        help="a lost device, or a node with all its devices; may be repeated",
    ),
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="DEVICE:FACTOR",
        help="a slow device or node, with the factor by which it takes longer; may be repeated",
    ),
]
AddedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--added",
        metavar="NAME=LIKE",
        help="an added device or node with the type and links of another (n1/gpu3=n1/gpu2); may "
        "be repeated",
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="the complete current cluster (TOML or JSON), instead of --lost and --added",
    ),
]
SlackOption = Annotated[
    float,
    typer.Option(
        "--slack",
        metavar="FRACTION",
        help="accept a plan slower than the fastest found by at most this fraction if it moves "
        "fewer bytes",
    ),
]
MovesOption = Annotated[
    Path | None,
    typer.Option(
        "--moves", metavar="FILE", help="write the moves of state (source, target, bytes) as JSON"
    ),
]


def replan(
    path: PlanArgument,
    output: PlanOutputOption,
    lost: LostOption = None,
    slow: SlowOption = None,
    added: AddedOption = None,
    cluster: ClusterOption = None,
    slack: SlackOption = 0.05,
    time_limit: TimeLimitOption = 1.0,
    moves: MovesOption = None,
    deterministic: DeterministicOption = False,
    runtime: RunByOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan again after devices were lost, slowed or added, moving as little state as possible."""
    with user_errors(as_json):
        from planner.cluster.cluster import Cluster
        from planner.prediction import load_plan
        from planner.replanning.replan import replan as replan_plan
        from planner.variants.machine_changes import parse_slow

        require_outputs({"--output": output, "--moves": moves}, [path, cluster])
        old = load_plan(path, runtime)
        found = replan_plan(
            old,
            lost=lost or (),
            slow=parse_slow(slow or ()),
            added=added or (),
            cluster=None if cluster is None else Cluster.load(cluster),
            slack=slack,
            time_limit_s=time_limit,
            deterministic=deterministic,
        )
        found.plan.save(output)
        if moves is not None:
            found.moves.save(moves)
        _show(found, output, moves, as_json=as_json)


def _show(found: Replanned, output: Path, moves: Path | None, *, as_json: bool) -> None:
    from planner.plan.run_command import resume_commands
    from planner.report.replanning import replanned_data, replanned_view

    if as_json:
        print_json({"plan": str(output), **replanned_data(found)})
        return
    show_plan(found.plan)
    written = f"wrote {output}" + (f" and {moves}" if moves is not None else "")
    show(*replanned_view(found), *(f"note: {note}" for note in found.notes), written)
    if (commands := resume_commands(found.plan, output)) is not None:
        start = "with the options of the original training, resume from the last checkpoint"
        show(*commands.lines(start))
