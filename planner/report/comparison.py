"""Planners compared, and synchronisation strategies compared: tables, Markdown and plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.report.tables import Table, View
from planner.sync.simulation.comparison import SyncComparison, SyncResult
from planner.sync.strategies import sync_name
from planner.units import format_bytes, format_seconds, listed, plural

if TYPE_CHECKING:
    from planner.analysis.comparison import ComparisonRow


def comparison_table(rows: Iterable[ComparisonRow], title: str) -> Table:
    """Return a row for each planner; one without a plan has the reason instead of a schedule."""
    numbers = "stages x devices, iteration, over ours, bubble, peak memory, gap to bound"
    return Table.of(title, ["planner", "schedule"], numbers.split(", "), map(_cells, rows))


def comparison_data(rows: Iterable[ComparisonRow]) -> list[dict[str, Any]]:
    """Return the rows as plain data, in seconds and bytes; null where there is no figure."""
    return [
        {
            "planner": row.planner,
            "source": row.source,
            "stages": None
            if row.stages is None
            else [
                {
                    "layers": list(stage.layers),
                    "devices": list(stage.devices),
                    "recompute": list(stage.recompute),
                }
                for stage in row.stages
            ],
            "devices": row.devices,
            "tensor_parallel": row.degrees[0] if len(row.degrees) == 1 else list(row.degrees),
            "schedule": row.schedule,
            **dict.fromkeys(
                ("iteration_time_s", "bubble", "peak_memory_bytes", "peak_memory_share")
            ),
            **({} if row.figures is None else row.figures._asdict()),
            "ratio": row.ratio,
            "gap": row.gap,
            "reason": row.reason,
            "planning_s": row.planning_s,
        }
        for row in rows
    ]


def _cells(row: ComparisonRow) -> list[str]:
    groups = "" if row.degrees == (1,) else f" in groups of {listed(row.degrees)}"
    shape = "-" if row.stages is None else f"{len(row.stages)} x {row.devices}{groups}"
    if row.figures is None:
        return [row.planner, row.reason or "-", shape, *["-"] * 5]
    figures = row.figures
    return [
        row.planner,
        row.schedule or "-",
        shape,
        format_seconds(figures.iteration_time_s),
        "-" if row.ratio is None else f"{row.ratio:.3f}",
        f"{figures.bubble:.1%}",
        f"{format_bytes(figures.peak_memory_bytes)} ({figures.peak_memory_share:.0%})",
        "-" if row.gap is None else f"{row.gap:.2%}",
    ]


COLUMNS: Mapping[str, str] = {
    "rate": "iterations per second, all pipelines together",
    "plain": "throughput relative to all_reduce:overlap=false",
    "overlap": "throughput relative to all_reduce",
    "to target": "simulated time until the mean model has a target loss, the geometric mean over "
    "the losses that all_reduce has after 10, 20, 30, 40 and 50 % of its iterations; * not all "
    "were reached, and each that was not counts as twice the whole run, or twice all_reduce's time",
    "speed-up": "time to target of all_reduce divided by this one",
    "loss": "final loss of the mean model",
    "apart": "distance of the pipelines' weights from their mean, relative to its norm",
    "mixing": "how much one round of averaging reduces disagreement, from 0 to 1 (spectral gap); - "
    "if nothing is averaged",
}
SMALL_PROBLEM = (
    "Losses and times to the target come from a small problem trained with SGD and momentum. They "
    "distinguish strategies and do not predict how your model learns."
)


def sync_view(comparison: SyncComparison) -> View:
    """Return a row per strategy, and what the columns mean."""
    scenario = comparison.scenario
    most, least = max(comparison.target_losses), min(comparison.target_losses)
    title = (
        f"Synchronisation: {plural(scenario.world.workers, 'pipeline')} of "
        f"{format_seconds(scenario.world.iteration_s)}, {plural(scenario.iterations, 'iteration')}"
        f" each, {plural(comparison.seeds, 'seed')}; target losses {most:.4f} to {least:.4f}"
    )
    table = Table.of(title, ["strategy"], list(COLUMNS), map(_sync_row, comparison.results))
    legend = "; ".join(f"{name}: {what}" for name, what in COLUMNS.items())
    return [table, f"{legend}.", SMALL_PROBLEM]


def _sync_row(result: SyncResult) -> tuple[str, ...]:
    return (
        sync_name(result.sync),
        f"{result.iterations_per_s:.4g}",
        f"{result.throughput_ratio:.2f}",
        f"{result.overlapped_ratio:.2f}",
        f"{'*' if result.missed_targets else ''}{format_seconds(result.target_s)}",
        f"{result.target_speedup:.2f}",
        f"{result.final_loss:.4f}",
        f"{result.consensus_distance:.3f}",
        "-" if result.spectral_gap is None else f"{result.spectral_gap:.3f}",
    )


def sync_data(comparison: SyncComparison) -> dict[str, Any]:
    """Return the comparison as plain data, with figures that the table omits."""
    scenario = comparison.scenario
    return {
        "workers": scenario.world.workers,
        "iterations": scenario.iterations,
        "iteration_s": scenario.world.iteration_s,
        "seeds": comparison.seeds,
        "target_losses": comparison.target_losses,
        "interrupted": comparison.interrupted,
        "strategies": [
            {**asdict(result), "sync": result.sync.model_dump(mode="json")}
            for result in comparison.results
        ],
    }
