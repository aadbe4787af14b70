"""The options of ``pipeplan simulate`` for synchronisation strategies, and their work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.output import console, print_json, say, show
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.plan.plan import Plan, Sync
    from planner.sync.simulation.comparison import Progress, SyncComparison
    from planner.sync.simulation.run import Scenario

ALL, CHOOSE = "all", "choose"
"""Words in place of the name of a synchronisation strategy: all of them; the one that suits."""
SyncOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sync",
        metavar="NAME[:OPTION=VALUE,…]",
        help="simulate training of the plan's pipelines under a synchronisation strategy; may be "
        "repeated; all: every strategy; choose: recommend one, which -o writes into the plan",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="simulate this many copies of the first pipeline (default: the plan's own pipelines)",
    ),
]
IterationsOption = Annotated[
    int | None,
    typer.Option("--iterations", metavar="N", help="iterations per pipeline (default: 200)"),
]
SlownessOption = Annotated[
    str | None,
    typer.Option(
        "--slowness",
        metavar="TRACE",
        help="slow:WORKERxFACTOR,…, sleep:PROBABILITY:SECONDS, drift[:SPREAD] or "
        "fault:WORKER:LEAVES_S[:RETURNS_S], joined by +; after a fault the other pipelines "
        "continue, even under synchronous strategies, where a real job would end",
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        "--seeds", metavar="N", help="seeds to average over (default: 1; with --sync choose 8)"
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", help="processes (default: one per core)"),
]
SyncTraceOption = Annotated[
    Path | None,
    typer.Option(
        "--sync-trace",
        metavar="MEASURED",
        help="take compute times, links and overheads from a trace written by the executor's "
        "--sync-trace",
    ),
]
LeastGainOption = Annotated[
    float | None,
    typer.Option(
        "--least-gain",
        metavar="FRACTION",
        help="with --sync choose: how much sooner at the same losses an approximate strategy "
        "must be (default: 0.05)",
    ),
]


@dataclass(frozen=True)
class SyncRequest:
    """The options of ``--sync``; None where an option was not given."""

    names: tuple[str, ...]
    workers: int | None = None
    iterations: int | None = None
    slowness: str | None = None
    seeds: int | None = None
    jobs: int | None = None
    sync_trace: Path | None = None
    least_gain: float | None = None


def sync_request_of(
    sync: list[str] | None, others: dict[str, Any], **options: Any
) -> SyncRequest | None:
    """Return the request that the options describe; None without ``--sync``.

    Args:
        sync: its values.
        others: options of the command that have no effect beside it, by name; None if not given.
        options: the other fields of a :class:`SyncRequest`.

    Raises:
        PipeplanError: if an option has no effect.
    """
    if not sync:
        _refuse(options, "without --sync; add --sync all")
        return None
    _refuse(others, "together with --sync; remove one")
    if options["least_gain"] is not None and sync != [CHOOSE]:
        _refuse({"least_gain": options["least_gain"]}, "without --sync choose")
    if CHOOSE in sync and len(sync) > 1:
        raise PipeplanError("--sync choose cannot be combined with another --sync; remove one")
    return SyncRequest(tuple(sync), **options)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        raise PipeplanError(f"{name}: {value} has no effect {why}" for name, value in given.items())


def require_sync(name: str | None) -> None:
    """Refuse an unknown strategy before any work.

    Raises:
        PipeplanError: naming what is wrong.
    """
    from planner.sync.papers import announce_paper
    from planner.sync.strategies import parse_sync

    if name not in (None, CHOOSE):
        parse_sync(str(name))
        announce_paper(str(name))


def needs_pipelines(name: str | None) -> bool:
    """Return whether a strategy runs only on plans of data-parallel pipelines."""
    from planner.sync.strategies import SYNCHRONOUS, parse_sync

    return name not in (None, CHOOSE) and parse_sync(str(name)).strategy not in SYNCHRONOUS


def with_sync(plan: Plan, name: str | None) -> tuple[Plan, str]:
    """Return the plan with a strategy, and why it was chosen or not possible.

    Args:
        plan: as it was found.
        name: of the strategy with its options, or ``choose``; None: as it is.
    """
    from planner.prediction import with_strategy
    from planner.sync.choice import choose
    from planner.sync.pipeline_replicas import pipeline_count
    from planner.sync.strategies import parse_sync, require_fit, sync_name

    if name is None:
        return plan, ""
    if name != CHOOSE:
        sync = parse_sync(name)
        try:
            require_fit(sync, pipeline_count(plan))
        except PipeplanError as error:
            kept = sync_name(plan.sync)
            return plan, f"{kept} is kept; {name} is not possible: {error.problems[0]}"
        return with_strategy(plan, sync), ""
    try:
        choice = choose(plan, jobs=os.cpu_count() or 1)
    except PipeplanError as error:
        kept = sync_name(plan.sync)
        return plan, f"{kept} is kept; there is nothing to choose: {error.problems[0]}"
    chosen = with_strategy(plan, choice.sync)
    return chosen, f"{sync_name(choice.sync)}: {choice.reason}"


def show_sync(path: Path, request: SyncRequest, output: Path | None, *, as_json: bool) -> None:
    """Simulate the requested strategies, print the results and write the plan if asked to.

    Raises:
        PipeplanError: naming what is wrong with the plan or an option.
    """
    from planner.prediction import load_plan, refresh, with_strategy
    from planner.verification import save_valid

    plan = refresh(load_plan(path))
    if output is not None:
        _require_writable(plan, request, output)
    sync = _show(plan, request, as_json=as_json)
    if output is not None and sync is not None:
        save_valid(with_strategy(plan, sync), output)
        if not as_json:
            say(f"wrote {output}")


def _require_writable(plan: Plan, request: SyncRequest, output: Path) -> None:
    """Refuse an output that could not be written, before any work."""
    from planner.prediction import with_strategy
    from planner.records.document import require_file_path
    from planner.sync.pipeline_replicas import pipeline_count
    from planner.sync.strategies import parse_sync
    from planner.verification import require_valid

    require_file_path(output)
    if len(request.names) > 1 or request.names == (ALL,):
        raise PipeplanError(
            "--output: needs exactly one strategy; give one --sync, or --sync choose"
        )
    count = pipeline_count(plan)
    if request.workers is not None and request.workers != count:
        raise PipeplanError(
            f"--output: the plan has {count} pipelines and not --workers {request.workers}, whose "
            "strategy may be another; leave one of the options out"
        )
    if request.names != (CHOOSE,):
        require_valid(with_strategy(plan, parse_sync(request.names[0])))


def _show(plan: Plan, request: SyncRequest, *, as_json: bool) -> Sync | None:
    """Print the results; return the one strategy that was requested or chosen, if there is one."""
    # An unknown strategy is refused before problems of the scenario.
    syncs = () if request.names == (CHOOSE,) else _strategies(request.names)
    scenario = _scenario(plan, request)
    if request.names == (CHOOSE,):
        return _show_choice(scenario, request, as_json=as_json)
    from planner.sync.simulation.comparison import compare_syncs

    with _progress() as progress:
        found = compare_syncs(
            scenario,
            syncs,
            seeds=_or(request.seeds, 1),
            jobs=_or(request.jobs, os.cpu_count() or 1),
            progress=progress,
        )
    _tell(found, as_json=as_json)
    if found.interrupted:
        raise KeyboardInterrupt(f"after {len(found.results)} of {len(syncs)} strategies")
    return syncs[0] if len(syncs) == 1 else None


def _show_choice(scenario: Scenario, request: SyncRequest, *, as_json: bool) -> Sync:
    from planner.report.comparison import sync_data
    from planner.sync.choice import LEAST_GAIN, SEEDS, InterruptedChoice, choose
    from planner.sync.strategies import sync_name

    try:
        with _progress() as progress:
            choice = choose(
                scenario,
                seeds=_or(request.seeds, SEEDS),
                jobs=_or(request.jobs, os.cpu_count() or 1),
                least_gain=LEAST_GAIN if request.least_gain is None else request.least_gain,
                progress=progress,
            )
    except InterruptedChoice as interrupted:
        _tell(interrupted.comparison, as_json=as_json)
        raise
    if as_json:
        chosen = {"sync": choice.sync.model_dump(mode="json"), "reason": choice.reason}
        print_json({"choice": chosen, **sync_data(choice.comparison)})
    else:
        _tell(choice.comparison, as_json=False)
        say(f"{sync_name(choice.sync)}: {choice.reason}")
    return choice.sync


def _tell(found: SyncComparison, *, as_json: bool) -> None:
    from planner.report.comparison import sync_data, sync_view

    if as_json:
        print_json(sync_data(found))
    else:
        show(*sync_view(found))


def _or(value: int | None, usual: int) -> int:
    return usual if value is None else value


def _strategies(names: tuple[str, ...]) -> tuple[Sync, ...]:
    from planner.sync.papers import announce_paper
    from planner.sync.simulation.comparison import ALL_STRATEGIES
    from planner.sync.strategies import parse_sync

    if ALL in names:
        return ALL_STRATEGIES
    names = tuple(dict.fromkeys(names))
    syncs = tuple(map(parse_sync, names))
    for name in names:
        announce_paper(name)
    return syncs


def _scenario(plan: Plan, request: SyncRequest) -> Scenario:
    from planner.measured.sync_trace import SyncTrace
    from planner.sync.simulation.calibration import calibrated
    from planner.sync.simulation.planned import from_plan, require_several
    from planner.sync.simulation.run import Scenario
    from planner.sync.simulation.slowness import parse_slowness

    world = from_plan(plan, request.workers)
    if request.sync_trace is not None:
        world = calibrated(world, SyncTrace.load(request.sync_trace))
        if request.workers is not None:
            world = replace(world, workers=request.workers, slowdown=())
    require_several(world)
    trace, faults = parse_slowness("steady" if request.slowness is None else request.slowness)
    return Scenario(world, _or(request.iterations, 200), trace, faults)


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show which strategies are done, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating strategies", total=None)
        done = 0

        def show(sync: Sync, seed: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=f"{done} runs done, last {sync.strategy}")

        yield show
