"""Predicted against measured times, and what a calibration changed: tables and plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from planner.analysis.deviation import Comparison, Deviation
from planner.interop.calibration import Calibration
from planner.plan.operations import KIND_LABELS, Kind, compress_devices, stages_label
from planner.report.tables import Table, View
from planner.units import format_seconds, plural

MOST_LARGEST, NOTICEABLE = 3, 0.01
"""Most differences that are named, and the share of an iteration from which on they are."""
UNSTEADY = 0.1
"""A spread of the steps' times that is told."""
MOST_ROWS = 12
"""Most rows of a table; the rest is counted."""
_FIGURES = ("count", "predicted ms", "measured ms", "measured / predicted")


def comparison_view(comparison: Comparison) -> View:
    """Return tables of kinds of events, worst stages and links, and lines that sum them up."""
    return [
        _kinds_table(comparison),
        _stages_table(comparison),
        *([_links_table(comparison)] if comparison.transfers else []),
        comparison_line(comparison),
        *comparison_notes(comparison),
    ]


def comparison_notes(comparison: Comparison) -> Iterator[str]:
    """Yield where the difference comes from, and whether the measurement can be trusted."""
    largest = [
        f"{what} {seconds * 1e3:+,.0f} ms"
        for what, seconds in comparison.largest[:MOST_LARGEST]
        if abs(seconds) >= NOTICEABLE * (comparison.iteration.measured_s or 0.0)
    ]
    if largest:
        yield f"predicted less measured, an iteration: {'; '.join(largest)}"
    yield from _batch_notes(comparison)
    if comparison.spread > UNSTEADY:
        yield (
            f"note: half of the steps differ by {comparison.spread:.0%} or more: something else "
            "used the machines, or their speed drifts; no prediction holds better than that, "
            "measure again when nothing does"
        )
    if comparison.clock_conflict is not None:
        yield f"note: {comparison.clock_conflict}"
    for line in comparison.other_hardware:
        yield f"note: {line}"


def _batch_notes(comparison: Comparison) -> Iterator[str]:
    """Yield which device waits longest for its batches, where that matters."""
    waits_s = {device: row.measured_s or 0.0 for device, row in comparison.batches.items()}
    device = max(waits_s, key=waits_s.__getitem__, default=None)
    time_s = comparison.iteration.measured_s
    if device is not None and time_s and waits_s[device] >= NOTICEABLE * time_s:
        yield (
            f"note: {device} spends {waits_s[device] * 1e3:,.0f} ms of an iteration "
            f"({waits_s[device] / time_s:.0%}) on loading batches, which no plan counts: a faster "
            "data set, or one that loads ahead, saves it"
        )


def comparison_line(comparison: Comparison) -> str:
    """Return the predicted and measured iteration time, and the error."""
    total = comparison.iteration
    off = comparison.error
    error = "" if off is None else f", error {round(off, 3) + 0.0:+.1%}"  # Never "-0.0%".
    slept = "; compute was emulated" if comparison.emulated else ""
    return (
        f"iteration {format_seconds(total.predicted_s or 0.0)} predicted, "
        f"{format_seconds(total.measured_s or 0.0)} measured (median of "
        f"{plural(len(comparison.steps), 'step')}{_first(comparison.steps)}){error}{slept}"
    )


def _first(steps: Sequence[int]) -> str:
    return f" from step {steps[0]}" if steps[0] > 1 else ""


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return every stage and link as plain data, in seconds; null where there is no figure."""
    operation, transfer = ("stage", "device", "kind"), ("source", "target")
    conflict, reduced = comparison.clock_conflict, comparison.reductions
    return {
        "iteration": _data(comparison.iteration),
        "error": comparison.error,
        "steps": list(comparison.steps),
        "spread": comparison.spread,
        "emulated": comparison.emulated,
        "clock_conflict": None if conflict is None else str(conflict),
        "other_hardware": list(comparison.other_hardware),
        "operations": _rows(operation, comparison.operations),
        "collectives": _rows(operation, comparison.collectives),
        "transfers": _rows(transfer, comparison.transfers),
        "all_reduces": [{"stages": list(of), **_data(row)} for of, row in reduced.items()],
        **{
            name: {key: _data(row) for key, row in getattr(comparison, name).items()}
            for name in ("kinds", "optimizer", "waiting", "batches", "outside")
        },
    }


def _rows(names: Sequence[str], rows: Mapping[Any, Deviation]) -> list[dict[str, Any]]:
    return [{**dict(zip(names, key, strict=True)), **_data(row)} for key, row in rows.items()]


def _data(row: Deviation) -> dict[str, Any]:
    return {**asdict(row), "ratio": row.ratio}


def _kinds_table(comparison: Comparison) -> Table:
    table = Table("Medians of all stages and devices", ("what",), _FIGURES)
    for kind, row in comparison.kinds.items():
        table.add_row(f"{kind} {KIND_LABELS[kind]}", *_cells(row))
    for kind, row in _collectives(comparison).items():
        table.add_row(f"{kind} collectives in groups, mean", *_cells(row))
    for stages, row in comparison.reductions.items():
        table.add_row(f"all-reduce {stages_label(stages)}", *_cells(row))
    for name, rows in (("optimizer step", comparison.optimizer), ("waiting", comparison.waiting)):
        table.add_row(f"{name}, mean of devices", *_cells(_mean(rows.values())))
    if comparison.batches:
        row = _mean(comparison.batches.values())
        table.add_row("loading batches, mean of devices", *_cells(row))
    for where, row in comparison.outside.items():
        table.add_row(where, *_cells(row))
    return table


def _collectives(comparison: Comparison) -> dict[Kind, Deviation]:
    """Return what of each kind of operation collectives inside groups take, as a mean."""
    rows: dict[Kind, list[Deviation]] = {}
    for (_, _, kind), row in comparison.collectives.items():
        rows.setdefault(kind, []).append(row)
    return {kind: _mean(found) for kind, found in rows.items()}


def _mean(rows: Iterable[Deviation]) -> Deviation:
    every = list(rows)
    expected = [row.predicted_s for row in every if row.predicted_s is not None]
    found = [row.measured_s for row in every if row.measured_s is not None]
    return Deviation(
        len(every),
        sum(expected) / len(expected) if expected else None,
        sum(found) / len(found) if found else None,
    )


def _stages_table(comparison: Comparison) -> Table:
    """Return a table of each stage and device's worst operation, the worst first."""
    worst: dict[tuple[int, str], tuple[Kind, Deviation]] = {}
    for (stage, device, kind), row in comparison.operations.items():
        old = worst.get((stage, device))
        if old is None or row.factor > old[1].factor:
            worst[stage, device] = (kind, row)
    ranked = sorted(worst.items(), key=lambda item: -item[1][1].factor)
    table = Table("Largest errors, by stage and device", ("stage", "device", "what"), _FIGURES)
    for (stage, device), (kind, row) in ranked[:MOST_ROWS]:
        table.add_row(str(stage), device, f"{kind} {KIND_LABELS[kind]}", *_cells(row))
    _count_rest(table, len(ranked))
    return table


def _links_table(comparison: Comparison) -> Table:
    table = Table("Transfers, from ready to received", ("from", "to"), _FIGURES)
    ranked = sorted(comparison.transfers.items(), key=lambda item: -item[1].factor)
    for (source, target), row in ranked[:MOST_ROWS]:
        table.add_row(source, target, *_cells(row))
    _count_rest(table, len(ranked))
    return table


def _count_rest(table: Table, count: int) -> None:
    if count > MOST_ROWS:
        table.note = f"and {count - MOST_ROWS:,} with smaller errors; --json lists all"


def _cells(row: Deviation) -> tuple[str, str, str, str]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return (f"{row.count:,}", milliseconds(row.predicted_s), milliseconds(row.measured_s), ratio)


def milliseconds(seconds: float | None) -> str:
    """Format seconds as a cell in ms; a dash where there is no figure."""
    return "-" if seconds is None else f"{seconds * 1e3:,.3f}"


def calibration_view(calibration: Calibration) -> View:
    """Return operations, links and all-reduces before and after, and notes."""
    return [
        *([_times_table(calibration)] if calibration.times else []),
        *([_calibrated_links_table(calibration)] if calibration.links else []),
        *([_optimizers_table(calibration)] if calibration.optimizers else []),
        *([_reductions_table(calibration)] if calibration.reductions else []),
        *(f"note: {note}" for note in calibration.notes),
        calibration_line(calibration),
    ]


def calibration_line(calibration: Calibration) -> str:
    """Return the iteration time predicted before and after, and measured."""
    return (
        f"iteration {format_seconds(calibration.before_s)} predicted before, "
        f"{format_seconds(calibration.after_s)} after, "
        f"{format_seconds(calibration.measured_s)} measured"
    )


def calibration_data(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration as plain data."""
    return {
        "predicted_before_s": calibration.before_s,
        "predicted_after_s": calibration.after_s,
        "measured_s": calibration.measured_s,
        "operations": [{**asdict(row), "spread": row.spread} for row in calibration.times],
        "links": [
            {
                "index": row.index,
                "method": row.method,
                "before": row.before.model_dump(mode="json"),
                "after": row.after.model_dump(mode="json"),
            }
            for row in calibration.links
        ],
        "optimizers": [asdict(row) for row in calibration.optimizers],
        "all_reduces": [
            {
                "stages": list(row.stages),
                "predicted_before_s": row.before.predicted_s,
                "predicted_after_s": row.after.predicted_s,
                "measured_s": row.before.measured_s,
            }
            for row in calibration.reductions
        ],
        "notes": list(calibration.notes),
    }


def _times_table(calibration: Calibration) -> Table:
    table = Table(
        "Operations, for one microbatch",
        ("stage", "type", "devices", "kind"),
        ("samples", "predicted ms", "measured ms"),
    )
    for row in calibration.times:
        table.add_row(
            str(row.stage),
            row.device_type,
            compress_devices(row.device_s),
            row.kind,
            f"{row.samples:,}",
            milliseconds(row.predicted_s),
            milliseconds(row.measured_s),
        )
    return table


def _calibrated_links_table(calibration: Calibration) -> Table:
    figures = ("GB/s before", "after", "latency us before", "after")
    table = Table("Links", ("link", "how"), figures)
    for row in calibration.links:
        table.add_row(
            row.name,
            row.method,
            *(f"{link.bandwidth_gb_per_s:,.4g}" for link in (row.before, row.after)),
            *(f"{link.latency_us:,.4g}" for link in (row.before, row.after)),
        )
    return table


def _optimizers_table(calibration: Calibration) -> Table:
    table = Table("Optimizer steps", ("type",), ("predicted ms before", "measured ms"))
    for row in calibration.optimizers:
        cells = map(milliseconds, (row.predicted_s, row.measured_s))
        table.add_row(row.device_type, *cells)
    return table


def _reductions_table(calibration: Calibration) -> Table:
    figures = ("predicted ms before", "after", "measured ms")
    table = Table("All-reduces, predicted from the links", ("gradients of",), figures)
    for row in calibration.reductions:
        times_s = (row.before.predicted_s, row.after.predicted_s, row.before.measured_s)
        table.add_row(stages_label(row.stages), *map(milliseconds, times_s))
    return table
