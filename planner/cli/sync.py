"""The options of ``pipeplan simulate`` that simulate synchronisation between pipelines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import completion
from planner.cli.output import print_json, print_rich
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.plan import Plan, Sync
    from planner.sync.simulation.comparison import Progress, SyncComparison
    from planner.sync.simulation.run import Scenario

SyncOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sync",
        metavar="NAME[:OPTION=VALUE,…]",
        help="simulate training of the plan's pipelines under a strategy of synchronisation; may "
        "be repeated; all: every one; choose: say which suits, and -o writes the plan with it",
        autocompletion=completion.simulated_strategies,
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", help="copies of the plan's first pipeline; its own unless given"
    ),
]
IterationsOption = Annotated[
    int | None,
    typer.Option("--iterations", metavar="N", help="of each pipeline; 200 unless given"),
]
SlownessOption = Annotated[
    str | None,
    typer.Option(
        "--slowness",
        metavar="TRACE",
        help="slow:WORKERxFACTOR,…, sleep:PROBABILITY:SECONDS, drift[:SPREAD] or "
        "fault:WORKER:LEAVES_S[:RETURNS_S], joined by +; after a fault the others go on, under "
        "strategies in step too, whose real job of all ranks would end",
    ),
]
SeedsOption = Annotated[
    int | None, typer.Option("--seeds", metavar="N", help="to average over; 1 unless given")
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", help="processes; as many as processors unless given"),
]
SyncTraceOption = Annotated[
    Path | None,
    typer.Option(
        "--sync-trace",
        metavar="MEASURED",
        help="take computation, links and overheads from a measured trace of synchronisation",
        autocompletion=completion.plans,
    ),
]
LeastGainOption = Annotated[
    float | None,
    typer.Option(
        "--least-gain",
        metavar="SHARE",
        help="--sync choose: by which a strategy that is not exact must be faster; 0.1 unless "
        "given",
    ),
]
ALL, CHOOSE = "all", "choose"


@dataclass(frozen=True)
class SyncRequest:
    """What the user asks of ``--sync``; None where nothing was given."""

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
    """What options ask for; None without ``--sync``.

    Args:
        sync: its values.
        others: options of the command that have no effect beside it, by name; None if not given.
        options: the other fields of a :class:`SyncRequest`.

    Raises:
        PipeplanError: if an option has no effect.
    """
    if not sync:
        _refuse(options, "without --sync; give --sync all too")
        return None
    _refuse(others, "beside --sync; leave one of them out")
    if options["least_gain"] is not None and sync != [CHOOSE]:
        _refuse({"least_gain": options["least_gain"]}, "without --sync choose")
    if CHOOSE in sync and len(sync) > 1:
        raise PipeplanError("sync: 'choose' stands by itself; leave the other --sync out")
    return SyncRequest(tuple(sync), **options)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        raise PipeplanError(f"{name}: {value} has no effect {why}" for name, value in given.items())


def require_sync(name: str | None) -> None:
    """Refuse a strategy that is none, before the work that would be lost.

    Raises:
        PipeplanError: naming what is wrong.
    """
    from planner.sync.strategies import parse_sync

    if name not in (None, CHOOSE):
        parse_sync(str(name))


def needs_pipelines(name: str | None) -> bool:
    """Whether a strategy runs only plans that consist of pipelines."""
    from planner.sync.strategies import TOGETHER, parse_sync

    return name not in (None, CHOOSE) and parse_sync(str(name)).strategy not in TOGETHER


def with_sync(plan: Plan, name: str | None) -> tuple[Plan, str]:
    """A plan with a strategy, and why it was chosen if it was, or not taken.

    Args:
        plan: as it was found.
        name: of the strategy with its options, or ``choose``; None: as it is.
    """
    from planner.sync.choice import choose
    from planner.sync.lanes import pipeline_count
    from planner.sync.strategies import parse_sync, require_fit, sync_name

    if name is None:
        return plan, ""
    if name != CHOOSE:
        sync = parse_sync(name)
        try:
            require_fit(sync, pipeline_count(plan))
        except PipeplanError as error:
            return plan, f"{sync_name(plan.sync)}: not {name}: {error.problems[0]}"
        return plan.model_copy(update={"sync": sync}), ""
    try:
        choice = choose(plan, jobs=os.cpu_count() or 1)
    except PipeplanError as error:
        return plan, f"{sync_name(plan.sync)}: nothing to choose: {error.problems[0]}"
    chosen = plan.model_copy(update={"sync": choice.sync})
    return chosen, f"{sync_name(choice.sync)}: {choice.reason}"


def show_sync(path: Path, request: SyncRequest, output: Path | None, *, as_json: bool) -> None:
    """Simulate what is asked for and print it; write the plan with the strategy if asked to.

    Raises:
        PipeplanError: naming what is wrong with the plan or an option.
    """
    from planner.artifacts.plan import Plan
    from planner.assemble import refresh

    plan = refresh(Plan.load(path))
    if output is not None:
        _require_writable(plan, request, output)
    sync = _show(plan, request, as_json=as_json)
    if output is not None and sync is not None:
        plan.model_copy(update={"sync": sync}).save(output)
        if not as_json:
            typer.echo(f"wrote {output}")


def _require_writable(plan: Plan, request: SyncRequest, output: Path) -> None:
    """Refuse what could not be written, before the work that would be lost."""
    from planner.artifacts.document import require_file_path
    from planner.sync.strategies import parse_sync
    from planner.verifier import require_valid

    require_file_path(output)
    if len(request.names) > 1 or request.names == (ALL,):
        raise PipeplanError("output: which strategy? Give one --sync, or --sync choose, with -o")
    if request.names != (CHOOSE,):
        require_valid(plan.model_copy(update={"sync": parse_sync(request.names[0])}))


def _show(plan: Plan, request: SyncRequest, *, as_json: bool) -> Sync | None:
    """Print the results; the one strategy that was asked for or chosen, if there is one."""
    # A word that is no strategy is told before what is in the way of all of them.
    syncs = () if request.names == (CHOOSE,) else _strategies(request.names)
    scenario = _scenario(plan, request)
    if request.names == (CHOOSE,):
        return _show_choice(scenario, request, as_json=as_json)
    from planner.report.sync import sync_data
    from planner.sync.simulation.comparison import compare_syncs

    with _progress() as progress:
        found = compare_syncs(
            scenario,
            syncs,
            seeds=_or(request.seeds, 1),
            jobs=_or(request.jobs, os.cpu_count() or 1),
            progress=progress,
        )
    if as_json:
        print_json(sync_data(found))
    else:
        _print(found)
    if found.interrupted:
        raise KeyboardInterrupt(f"after {len(found.results)} of {len(syncs)} strategies")
    return syncs[0] if len(syncs) == 1 else None


def _show_choice(scenario: Scenario, request: SyncRequest, *, as_json: bool) -> Sync:
    from planner.report.sync import sync_data
    from planner.sync.choice import choose
    from planner.sync.strategies import sync_name

    with _progress() as progress:
        choice = choose(
            scenario,
            seeds=_or(request.seeds, 1),
            jobs=_or(request.jobs, os.cpu_count() or 1),
            least_gain=0.1 if request.least_gain is None else request.least_gain,
            progress=progress,
        )
    if as_json:
        chosen = {"sync": choice.sync.model_dump(mode="json"), "reason": choice.reason}
        print_json({"choice": chosen, **sync_data(choice.comparison)})
    else:
        _print(choice.comparison)
        typer.echo(f"{sync_name(choice.sync)}: {choice.reason}")
    return choice.sync


def _print(found: SyncComparison) -> None:
    from planner.report.sync import sync_table

    print_rich(sync_table(found))


def _or(value: int | None, usual: int) -> int:
    return usual if value is None else value


def _strategies(names: tuple[str, ...]) -> tuple[Sync, ...]:
    from planner.sync.simulation.comparison import ALL_STRATEGIES
    from planner.sync.strategies import parse_sync

    if ALL in names:
        return ALL_STRATEGIES
    return tuple(map(parse_sync, names))


def _scenario(plan: Plan, request: SyncRequest) -> Scenario:
    from planner.artifacts.sync_trace import SyncTrace
    from planner.sync.simulation.calibration import calibrated
    from planner.sync.simulation.planned import from_plan
    from planner.sync.simulation.run import Scenario
    from planner.sync.simulation.slowness import parse_slowness

    world = from_plan(plan, request.workers)
    if request.sync_trace is not None:
        world = calibrated(world, SyncTrace.load(request.sync_trace))
        if request.workers is not None:
            world = replace(world, workers=request.workers, slowdown=())
    trace, faults = parse_slowness(request.slowness or "steady")
    return Scenario(world, _or(request.iterations, 200), trace, faults)


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Which strategies are done, on a terminal's standard error."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating strategies", total=None)
        done = 0

        def told(sync: Sync, seed: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=f"{done} runs done, last {sync.strategy}")

        yield told
