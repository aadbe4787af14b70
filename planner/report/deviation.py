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
_Rows = Iterable[tuple[Sequence[str], Deviation]]
"""Words of a row, and its figures."""


def comparison_view(comparison: Comparison) -> View:
    """Return tables of kinds of events, worst stages and links, and lines that sum them up."""
    links = [((source, target), row) for (source, target), row in comparison.transfers.items()]
    return [
        _table("Medians of all stages and devices", ("what",), _kinds(comparison)),
        _worst(
            "Largest errors, by stage and device", ("stage", "device", "what"), _stages(comparison)
        ),
        *([_worst("Transfers, from ready to received", ("from", "to"), links)] if links else []),
        comparison_line(comparison),
        *comparison_notes(comparison),
    ]


def comparison_notes(comparison: Comparison) -> Iterator[str]:
    """Yield where the difference comes from, and whether the measurement can be trusted."""
    time_s = comparison.iteration.measured_s or 0.0
    largest = [
        f"{what} {seconds * 1e3:+,.0f} ms"
        for what, seconds in comparison.largest[:MOST_LARGEST]
        if abs(seconds) >= NOTICEABLE * time_s
    ]
    if largest:
        yield f"predicted less measured, an iteration: {'; '.join(largest)}"
    waits_s = {device: row.measured_s or 0.0 for device, row in comparison.batches.items()}
    device = max(waits_s, key=waits_s.__getitem__, default=None)
    if device is not None and time_s and waits_s[device] >= NOTICEABLE * time_s:
        yield (
            f"note: {device} spends {waits_s[device] * 1e3:,.0f} ms of an iteration "
            f"({waits_s[device] / time_s:.0%}) on loading batches, which no plan counts: a faster "
            "data set, or one that loads ahead, saves it"
        )
    if comparison.spread > UNSTEADY:
        yield (
            f"note: half of the steps differ by {comparison.spread:.0%} or more: something else "
            "used the machines, or their speed drifts; no prediction holds better than that, "
            "measure again when nothing does"
        )
    if comparison.clock_conflict is not None:
        yield f"note: {comparison.clock_conflict}"
    yield from (f"note: {line}" for line in comparison.other_hardware)


def comparison_line(comparison: Comparison) -> str:
    """Return the predicted and measured iteration time, and the error."""
    total, steps, off = comparison.iteration, comparison.steps, comparison.error
    error = "" if off is None else f", error {round(off, 3) + 0.0:+.1%}"  # Never "-0.0%".
    first = f" from step {steps[0]}" if steps[0] > 1 else ""
    slept = "; compute was emulated" if comparison.emulated else ""
    return (
        f"iteration {format_seconds(total.predicted_s or 0.0)} predicted, "
        f"{format_seconds(total.measured_s or 0.0)} measured (median of "
        f"{plural(len(steps), 'step')}{first}){error}{slept}"
    )


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return every stage and link as plain data, in seconds; null where there is no figure."""
    operation, conflict = ("stage", "device", "kind"), comparison.clock_conflict
    return {
        "iteration": _data(comparison.iteration),
        "error": comparison.error,
        "steps": list(comparison.steps),
        "spread": comparison.spread,
        "emulated": comparison.emulated,
        "clock_conflict": None if conflict is None else str(conflict),
        "other_hardware": list(comparison.other_hardware),
        "operations": _keyed(operation, comparison.operations),
        "collectives": _keyed(operation, comparison.collectives),
        "transfers": _keyed(("source", "target"), comparison.transfers),
        "all_reduces": [
            {"stages": list(stages), **_data(row)} for stages, row in comparison.reductions.items()
        ],
        **{
            name: {key: _data(row) for key, row in getattr(comparison, name).items()}
            for name in ("kinds", "optimizer", "waiting", "batches", "outside")
        },
    }


def _keyed(names: Sequence[str], rows: Mapping[Any, Deviation]) -> list[dict[str, Any]]:
    return [{**dict(zip(names, key, strict=True)), **_data(row)} for key, row in rows.items()]


def _data(row: Deviation) -> dict[str, Any]:
    return {**asdict(row), "ratio": row.ratio}


def _kinds(comparison: Comparison) -> Iterator[tuple[Sequence[str], Deviation]]:
    for kind, row in comparison.kinds.items():
        yield (f"{kind} {KIND_LABELS[kind]}",), row
    inside: dict[Kind, list[Deviation]] = {}
    for (_, _, kind), row in comparison.collectives.items():
        inside.setdefault(kind, []).append(row)
    for kind, rows in inside.items():
        yield (f"{kind} collectives in groups, mean",), _mean(rows)
    for stages, row in comparison.reductions.items():
        yield (f"all-reduce {stages_label(stages)}",), row
    yield ("optimizer step, mean of devices",), _mean(comparison.optimizer.values())
    yield ("waiting, mean of devices",), _mean(comparison.waiting.values())
    if comparison.batches:
        yield ("loading batches, mean of devices",), _mean(comparison.batches.values())
    for where, row in comparison.outside.items():
        yield (where,), row


def _mean(rows: Iterable[Deviation]) -> Deviation:
    every = list(rows)
    expected = [row.predicted_s for row in every if row.predicted_s is not None]
    found = [row.measured_s for row in every if row.measured_s is not None]
    return Deviation(
        len(every),
        sum(expected) / len(expected) if expected else None,
        sum(found) / len(found) if found else None,
    )


def _stages(comparison: Comparison) -> _Rows:
    """Return the worst kind of operation of each stage and device."""
    worst: dict[tuple[int, str], tuple[Kind, Deviation]] = {}
    for (stage, device, kind), row in comparison.operations.items():
        old = worst.get((stage, device))
        if old is None or row.factor > old[1].factor:
            worst[stage, device] = (kind, row)
    return [
        ((str(stage), device, f"{kind} {KIND_LABELS[kind]}"), row)
        for (stage, device), (kind, row) in worst.items()
    ]


def _worst(title: str, words: Sequence[str], rows: _Rows) -> Table:
    """Return a table of the rows whose prediction is furthest off; the others are counted."""
    ranked = sorted(rows, key=lambda row: -row[1].factor)
    table = _table(title, words, ranked[:MOST_ROWS])
    if len(ranked) > MOST_ROWS:
        more = f"{len(ranked) - MOST_ROWS:,}"
        table.note = f"and {more} with smaller errors; --json lists all"
    return table


def _table(title: str, words: Sequence[str], rows: _Rows) -> Table:
    figures = ("count", "predicted ms", "measured ms", "measured / predicted")
    return Table.of(title, words, figures, ((*names, *_cells(row)) for names, row in rows))


def _cells(row: Deviation) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return (f"{row.count:,}", *_milliseconds(row.predicted_s, row.measured_s), ratio)


def _milliseconds(*seconds: float | None) -> Iterator[str]:
    return ("-" if value is None else f"{value * 1e3:,.3f}" for value in seconds)


# --- calibration ----------------------------------------------------------------------------------


def calibration_view(calibration: Calibration) -> View:
    """Return operations, links and all-reduces before and after, and notes."""
    return [
        *(table for table in _calibration_tables(calibration) if table.rows),
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


def _calibration_tables(calibration: Calibration) -> Iterator[Table]:
    yield Table.of(
        "Operations, for one microbatch",
        ("stage", "type", "devices", "kind"),
        ("samples", "predicted ms", "measured ms"),
        (
            (
                *(str(row.stage), row.device_type, compress_devices(row.device_s), row.kind),
                *(f"{row.samples:,}", *_milliseconds(row.predicted_s, row.measured_s)),
            )
            for row in calibration.times
        ),
    )
    yield Table.of(
        "Links",
        ("link", "how"),
        ("GB/s before", "after", "latency us before", "after"),
        (
            (
                *(row.name, row.method),
                *(f"{link.bandwidth_gb_per_s:,.4g}" for link in (row.before, row.after)),
                *(f"{link.latency_us:,.4g}" for link in (row.before, row.after)),
            )
            for row in calibration.links
        ),
    )
    yield Table.of(
        "Optimizer steps",
        ("type",),
        ("predicted ms before", "measured ms"),
        (
            (row.device_type, *_milliseconds(row.predicted_s, row.measured_s))
            for row in calibration.optimizers
        ),
    )
    yield Table.of(
        "All-reduces, predicted from the links",
        ("gradients of",),
        ("predicted ms before", "after", "measured ms"),
        (
            (
                stages_label(row.stages),
                *_milliseconds(
                    row.before.predicted_s, row.after.predicted_s, row.before.measured_s
                ),
            )
            for row in calibration.reductions
        ),
    )
