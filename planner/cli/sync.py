"""Synchronisation strategies on a command line: ``--sync`` of ``plan`` and ``simulate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.output import console, print_json, say, show
from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.plan.plan import Plan, Sync
    from planner.sync.simulation.comparison import Progress, SyncComparison
    from planner.sync.simulation.run import Scenario

ALL, CHOOSE = "all", "choose"
"""Words in place of the name of a synchronisation strategy: all of them; the one that suits."""


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
    try:
        if name != CHOOSE:
            sync = parse_sync(name)
            require_fit(sync, pipeline_count(plan))
            return with_strategy(plan, sync), ""
        choice = choose(plan, jobs=os.cpu_count() or 1)
    except PipeplanError as error:
        why = "there is nothing to choose" if name == CHOOSE else f"{name} is not possible"
        return plan, f"{sync_name(plan.sync)} is kept; {why}: {error.problems[0]}"
    return with_strategy(plan, choice.sync), f"{sync_name(choice.sync)}: {choice.reason}"


def show_sync(
    path: Path,
    names: Sequence[str],
    *,
    pipelines: int | None,
    iterations: int,
    slowness: str,
    seeds: int | None,
    sync_trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate strategies and print the results.

    Args:
        path: of the plan.
        names: strategies with their options, ``all``, or ``choose`` alone.
        pipelines: copies of the first pipeline; None: the plan's own pipelines.
        iterations: of each pipeline.
        slowness: of pipelines over time.
        seeds: to average over; None: as the kind of simulation needs.
        sync_trace: measured times of synchronisation.
        as_json: print JSON.

    Raises:
        PipeplanError: naming what is wrong with the plan or an option.
    """
    from planner.prediction import load_plan, refresh

    if CHOOSE in names and len(names) > 1:
        raise PipeplanError("--sync choose cannot be combined with another --sync; remove one")
    plan = refresh(load_plan(path))
    # An unknown strategy is refused before problems of the scenario.
    syncs = () if CHOOSE in names else _strategies(names)
    scenario = _scenario(plan, pipelines, iterations, slowness, sync_trace)
    if CHOOSE in names:
        _show_choice(scenario, seeds, as_json=as_json)
    else:
        _show_comparison(scenario, syncs, 1 if seeds is None else seeds, as_json=as_json)


def _show_comparison(
    scenario: Scenario, syncs: Sequence[Sync], seeds: int, *, as_json: bool
) -> None:
    from planner.sync.simulation.comparison import compare_syncs

    with _progress() as progress:
        jobs = os.cpu_count() or 1
        found = compare_syncs(scenario, syncs, seeds=seeds, jobs=jobs, progress=progress)
    _tell(found, as_json=as_json)
    if found.interrupted:
        raise KeyboardInterrupt(f"after {len(found.results)} of {len(syncs)} strategies")


def _show_choice(scenario: Scenario, seeds: int | None, *, as_json: bool) -> None:
    from planner.sync.choice import SEEDS, InterruptedChoice, choose
    from planner.sync.strategies import sync_name

    seeds = SEEDS if seeds is None else seeds
    try:
        with _progress() as progress:
            choice = choose(scenario, seeds=seeds, jobs=os.cpu_count() or 1, progress=progress)
    except InterruptedChoice as interrupted:
        _tell(interrupted.comparison, as_json=as_json)
        raise
    name = sync_name(choice.sync)
    chosen = {"sync": choice.sync.model_dump(mode="json"), "reason": choice.reason}
    _tell(choice.comparison, as_json=as_json, choice=chosen)
    if not as_json:
        say(f"{name}: {choice.reason}")
        say(f"train with it by: torchrun … -m executor PLAN --sync {name}")


def _tell(found: SyncComparison, *, as_json: bool, **more: Any) -> None:
    from planner.report.comparison import sync_data, sync_view

    if as_json:
        print_json({**more, **sync_data(found)})
    else:
        show(*sync_view(found))


def _strategies(names: Sequence[str]) -> tuple[Sync, ...]:
    from planner.sync.papers import announce_paper
    from planner.sync.simulation.comparison import ALL_STRATEGIES
    from planner.sync.strategies import parse_sync

    if ALL in names:
        return ALL_STRATEGIES
    names = list(dict.fromkeys(names))
    syncs = tuple(map(parse_sync, names))
    for name in names:
        announce_paper(name)
    return syncs


def _scenario(
    plan: Plan, pipelines: int | None, iterations: int, slowness: str, sync_trace: Path | None
) -> Scenario:
    from planner.measured.sync_trace import SyncTrace
    from planner.sync.simulation.calibration import calibrated
    from planner.sync.simulation.planned import from_plan, require_several
    from planner.sync.simulation.run import Scenario
    from planner.sync.simulation.slowness import parse_slowness

    world = from_plan(plan, pipelines)
    if sync_trace is not None:
        world = calibrated(world, SyncTrace.load(sync_trace))
        if pipelines is not None:
            world = replace(world, workers=pipelines, slowdown=())
    require_several(world)
    return Scenario(world, iterations, *parse_slowness(slowness))


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show which strategies are done, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    done = 0
    with console(stderr=True).status("simulating strategies") as status:

        def show_done(sync: Sync, seed: int) -> None:
            nonlocal done
            done += 1
            status.update(f"{done} runs done, last {sync.strategy}")

        yield show_done
