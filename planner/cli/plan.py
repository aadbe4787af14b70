"""``pipeplan plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import completion
from planner.cli.models import Asked
from planner.cli.options import (
    ClusterOption,
    JobOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    SetOption,
    WorkersOption,
)
from planner.cli.output import user_errors
from planner.cli.planning import PlanRequest, SearchSettings, keep_warm_starts, make_plan
from planner.solver_settings import DEFAULT_WORKERS

CostsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="measured times: a profile, or the graph of `calibrate --graph`; may be repeated",
        autocompletion=completion.plans,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="plan file, plan.json unless given")
]
DEFAULT_OUTPUT = Path("plan.json")
TimeLimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="stop after this long; with --deterministic in CP-SAT's own seconds, of 1 to 10 s",
    ),
]
GapOption = Annotated[float, typer.Option("--gap", help="stop once time / bound - 1 is this small")]
WarmStartOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--warm-start",
        metavar="PLAN",
        help="start from this plan's stages",
        autocompletion=completion.plans,
    ),
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="the same plan on every run and machine")
]
RobustOption = Annotated[
    bool,
    typer.Option(
        "--robust",
        help="prefer a plan that keeps its time under noise (jitter 0.05) and is at most 2 % "
        "slower without",
    ),
]
SyncOption = Annotated[
    str | None,
    typer.Option(
        "--sync",
        metavar="NAME[:OPTION=VALUE,…]",
        help="how replicas agree, all_reduce unless given; choose: what suits the plan's "
        "pipelines, by simulation; one between pipelines makes a plan of pipelines",
        autocompletion=completion.strategies,
    ),
]


def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    job: JobOption = None,
    set_: SetOption = None,
    costs: CostsOption = None,
    output: OutputOption = None,
    time_limit: TimeLimitOption = 30.0,
    gap: GapOption = 1e-4,
    seed: SeedOption = 0,
    workers: WorkersOption = DEFAULT_WORKERS,
    warm_start: WarmStartOption = None,
    deterministic: DeterministicOption = False,
    robust: RobustOption = False,
    sync: SyncOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan and prove how far from the best it can be."""
    request = PlanRequest(
        asked=Asked(model, cluster, job, tuple(set_ or ()), tuple(costs or ())),
        warm_starts=tuple(warm_start or ()),
        robust=robust,
        sync=sync,
    )
    settings = SearchSettings(time_limit, gap, seed, workers, deterministic)
    with user_errors(as_json):
        if output is None:
            keep_warm_starts(DEFAULT_OUTPUT, request)
        make_plan(request, settings, output or DEFAULT_OUTPUT, as_json=as_json)
