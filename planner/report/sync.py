"""Strategies of synchronisation compared, for a terminal and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.report.tables import new_table
from planner.sync.simulation.comparison import SyncComparison, SyncResult
from planner.sync.strategies import sync_name
from planner.units import format_seconds, plural

if TYPE_CHECKING:
    from rich.console import Group

COLUMNS: Mapping[str, str] = {
    "rate": "iterations a second of all pipelines together",
    "plain": "the rate over that of all_reduce:overlap=false",
    "overlap": "the rate over that of all_reduce",
    "to target": "virtual time until the mean model has the target loss, which all_reduce has "
    "after half of its iterations",
    "speed-up": "all_reduce's time to it over this one's",
    "loss": "of the mean model in the end",
    "apart": "how far the pipelines' weights are from their mean, as a share of its norm",
    "mixing": "how far one round of averages brings all together, from 0 to 1 (the spectral gap); "
    "- where pipelines average with nobody",
}
SMALL_PROBLEM = (
    "Losses, and so the time to the target, are of a small problem trained by SGD with momentum: "
    "they tell strategies apart, not how your model will learn."
)


def sync_table(comparison: SyncComparison) -> Group:
    """A row for each strategy, and what the columns are."""
    from rich.console import Group
    from rich.text import Text

    scenario = comparison.scenario
    title = (
        f"Synchronisation: {plural(scenario.world.workers, 'pipeline')} of "
        f"{format_seconds(scenario.world.iteration_s)}, {plural(scenario.iterations, 'iteration')}"
        f" each, {plural(comparison.seeds, 'seed')}; target loss {comparison.target_loss:.4f}"
    )
    table = new_table(title, ("strategy",), [name.replace("to ", "to\n") for name in COLUMNS])
    # Names fold and figures do not; at 80 columns that leaves names as much room as can be.
    table.padding, table.show_edge = (0, 0, 0, 0), False
    for column in table.columns[1:]:
        column.no_wrap = True
    for result in comparison.results:
        table.add_row(*_row(result))
    legend = "; ".join(f"{name}: {what}" for name, what in COLUMNS.items())
    return Group(table, Text(f"\n{legend}.\n{SMALL_PROBLEM}"))


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
