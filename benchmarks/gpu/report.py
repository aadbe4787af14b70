"""The report: a page made of the journal, which has a line for all that began and ended."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case
from benchmarks.reporting.report import heading, table
from planner.cluster.hardware import GIB
from planner.records.document import write_atomically

Rows = Mapping[str, Mapping[str, Any]]
COLUMNS = (
    *("Case", "Ranks", "Result", "Losses off by", "Step, s", "Predicted, s"),
    *("Peak, GiB", "Predicted, GiB"),
)


def ended_in(journal: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the cases that have ended, by key; a half-written last line is none."""
    return {row["end"]: row for row in _rows(journal) if "end" in row}


def _rows(journal: Path) -> Iterator[dict[str, Any]]:
    for line in journal.read_text().splitlines() if journal.exists() else []:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def running_in(journal: Path) -> str | None:
    """Return the key of the case that has begun and not ended, if there is one."""
    begun = None
    for row in _rows(journal):
        begun = row.get("begin", begun)
        begun = None if row.get("end") == begun else begun
    return begun


def write_page(path: Path, cases: Sequence[Case], rows: Rows, command: str) -> None:
    """Write the page of what has ended so far."""
    parts = [heading("What GPUs do", command)]
    for section, held in groupby(cases, key=lambda case: case.section):
        parts.append(f"## {section.capitalize()}\n")
        listed = list(held)
        trained = [case for case in listed if case.probe is None]
        if trained:
            parts.append(table(COLUMNS, [_cells(case, rows) for case in trained]))
        parts += [_probed(case, rows.get(case.key)) for case in listed if case.probe is not None]
    write_atomically(path, "\n".join(parts))


def _cells(case: Case, rows: Rows) -> list[str]:
    row = rows.get(case.key)
    if row is None or "error" in row:
        return [case.name, str(case.ranks), _result(row), *[""] * 5]
    off = _off(row, rows.get(f"{case.section}: {case.reference}"))
    # The first step loads kernels and opens connections.
    step_s = statistics.median(row["step_s"][1:] or row["step_s"]) if row["step_s"] else None
    return [
        case.name,
        str(case.ranks),
        "ran",
        "" if off is None else f"{off:.1e}",
        "" if step_s is None else f"{step_s:.4f}",
        f"{row['predicted_s']:.4f}",
        f"{(row['peak_bytes'] or 0) / GIB:.3f}",
        f"{row['predicted_bytes'] / GIB:.3f}",
    ]


def _result(row: Mapping[str, Any] | None) -> str:
    return "not run" if row is None else str(row["error"]).replace("|", "\\|").replace("\n", " ")


def _off(row: Mapping[str, Any], reference: Mapping[str, Any] | None) -> float | None:
    """Return the largest relative difference of two trainings' losses."""
    if reference is None or "losses" not in reference:
        return None
    pairs = list(zip(row["losses"], reference["losses"], strict=False))
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)


def _probed(case: Case, row: Mapping[str, Any] | None) -> str:
    if row is None or "error" in row:
        return f"{case.name}: {_result(row)}\n"
    shown = {name: value for name, value in row.items() if name not in ("end", "took_s")}
    lines = [f"- {name}: {_shown(value)}" for name, value in shown.items()]
    return "\n".join([f"{case.name}:\n", *lines]) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and "\n" in value:
        return "\n\n```\n" + value.rstrip() + "\n```\n"
    return str(value)
