"""Strategies of synchronisation compared, for a terminal and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.artifacts.plan import Sync
from planner.report.tables import new_table
from planner.sync.simulation.comparison import SyncComparison, SyncResult
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from rich.table import Table


def sync_name(sync: Sync) -> str:
    """As a command names it, such as ``partial_all_reduce:schedule=static``."""
    options = ",".join(f"{name}={_value(value)}" for name, value in sync.options.items())
    return f"{sync.strategy}:{options}" if options else sync.strategy


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def sync_table(comparison: SyncComparison) -> Table:
    """A row for each strategy."""
    scenario = comparison.scenario
    title = (
        f"Synchronisation: {plural(scenario.world.workers, 'pipeline')} of "
        f"{format_seconds(scenario.world.iteration_s)}, {plural(scenario.iterations, 'iteration')}"
        f" each, {plural(comparison.seeds, 'seed')}; target loss {comparison.target_loss:.4f}\n"
        "rate in iterations/s, as a ratio to all_reduce:overlap=false (plain) and to "
        "all_reduce (overlap)"
    )
    numbers = (
        "rate",
        "plain",
        "overlap",
        "to target",
        "speed-up",
        "loss",
        "distance",
        "gap",
    )
    table = new_table(title, ("strategy",), numbers)
    table.columns[0].no_wrap = True
    for result in comparison.results:
        table.add_row(*_row(result))
    return table


def _row(result: SyncResult) -> tuple[str, ...]:
    return (
        sync_name(result.sync),
        f"{result.iterations_per_s:.4g}",
        f"{result.throughput_ratio:.2f}",
        f"{result.overlapped_ratio:.2f}",
        "never" if result.target_s is None else format_seconds(result.target_s),
        "-" if result.target_speedup is None else f"{result.target_speedup:.2f}",
        f"{result.final_loss:.4f}",
        f"{result.consensus_distance:.3f}",
        "-" if result.spectral_gap is None else f"{result.spectral_gap:.3f}",
    )


def sync_data(comparison: SyncComparison) -> dict[str, Any]:
    """The same as plain data, with what the table leaves out."""
    scenario = comparison.scenario
    return {
        "workers": scenario.world.workers,
        "iterations": scenario.iterations,
        "iteration_s": scenario.world.iteration_s,
        "seeds": comparison.seeds,
        "target_loss": comparison.target_loss,
        "interrupted": comparison.interrupted,
        "strategies": [
            {**asdict(result), "sync": result.sync.model_dump(mode="json")}
            for result in comparison.results
        ],
    }
