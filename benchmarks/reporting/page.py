"""The page of all benchmarks, from their claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.catalogue import ROOM, Benchmark, full_report
from benchmarks.reporting.claims import COLUMNS, NEEDS_DATA, Claim, cell_of, markdown
from benchmarks.reporting.report import heading, table
from benchmarks.reporting.running import Ran
from planner.units import plural

BUSY_CORES = 0.1
"""Load of other jobs, above which times are not those of a quiet machine."""
ABOUT = (
    "One row a claim: who says it, the bar, our figure in the benchmark's *short* form, and "
    "whether the bar is reached. A short form checks the same bars on fewer instances, never "
    "looser ones; below each stands what it leaves out, and the full report beside each claim has "
    "it or says that it was not measured. *no bar*: the figure is told, nobody claims one."
)


def page(
    command: str,
    benchmarks: Sequence[Benchmark],
    runs: Mapping[str, Ran],
    wall_s: float,
    room: Path = ROOM,
) -> str:
    """The page as far as it is known.

    Args:
        command: that made it.
        benchmarks: in order.
        runs: by their names; none for one that is still to come.
        wall_s: that all took together.
        room: folder of the full reports.
    """
    found = {b: runs.get(b.name, Ran("not run: not yet")) for b in benchmarks}
    parts = [
        heading("Benchmarks on one page", command),
        f"It took {wall_s / 60:.1f} min. {_quiet(list(found.values()))}\n",
        f"{ABOUT}\n",
        _count(found),
        "## What is claimed\n",
        _claims_table(found, room),
        "## How they ran\n",
        _runs_table(found, room),
        *(part for b in benchmarks for part in _section(b, found[b])),
    ]
    return "\n".join(parts)


def _quiet(runs: Sequence[Ran]) -> str:
    """Return whether the machine was idle enough for the times to count."""
    known = [(run.others_cores, run.seconds) for run in runs if run.seconds is not None]
    if not known or any(cores is None for cores, _ in known):
        return "What else the machine did meanwhile is not known."
    total_s = math.fsum(seconds for _, seconds in known)
    cores = math.fsum((cores or 0.0) * seconds for cores, seconds in known) / total_s
    told = f"Other jobs kept {cores:.2f} cores busy meanwhile"
    if cores <= BUSY_CORES:
        return f"{told}."
    return f"**{told}: times, and what searches find by the clock, are not those of a quiet one.**"


def _count(found: Mapping[Benchmark, Ran]) -> str:
    """Return the number of claims of each verdict, and the names of those missed."""
    claims = [(b, claim) for b, run in found.items() for claim in _claims_of(run)]
    missed = [f"- {b.name}: {_short(claim)}" for b, claim in claims if claim.reached is False]
    reached = sum(claim.reached is True for _, claim in claims)
    skipped = sum(bool(claim.not_run) for _, claim in claims)
    untold = len(claims) - reached - len(missed) - skipped
    line = (
        f"**{reached} claims reached, {len(missed)} not reached, {skipped} not run, {untold} "
        "without a bar.**"
    )
    broken = [f"- {b.name}: {run.status}" for b, run in found.items() if not run.is_well]
    parts = [line + "\n"]
    if missed:
        parts.append("Not reached:\n\n" + "\n".join(missed) + "\n")
    if broken:
        parts.append("Not run to the end:\n\n" + "\n".join(broken) + "\n")
    return "\n".join(parts)


def _short(claim: Claim) -> str:
    return f"{_named(claim)}: {claim.figure_cell}, bar {claim.bar_cell}"


def _named(claim: Claim) -> str:
    """Return a claim's text with its regime, which tells equal claims apart."""
    return cell_of(f"{claim.claim} ({claim.regime})" if claim.regime else claim.claim)


def _claims_of(run: Ran) -> list[Claim]:
    return [entry for entry in run.entries if isinstance(entry, Claim)]


def _claims_table(found: Mapping[Benchmark, Ran], room: Path) -> str:
    rows = []
    for benchmark, run in found.items():
        link = _full_link(benchmark, room)
        claims = _claims_of(run)
        rows += [(_named(claim), *map(cell_of, claim.cells[1:]), link) for claim in claims]
        if not run.is_well:
            told = "the rest of" if claims else "all of"
            rows.append((f"{told} {benchmark.name}", "-", "-", "-", cell_of(run.status), link))
    return table((*COLUMNS, "full report"), rows)


def _full_link(benchmark: Benchmark, room: Path) -> str:
    report = full_report(benchmark, room)
    if report is None:
        return f"{benchmark.report}: none yet"
    return f"[{benchmark.report}]({benchmark.report}), {report.date}"


def _runs_table(found: Mapping[Benchmark, Ran], room: Path) -> str:
    columns = (
        *("benchmark", "short form", "seconds", "others' cores"),
        *("full benchmark", "its last report", "says “not reached”"),
    )
    return table(columns, [list(_run_cells(b, run, room)) for b, run in found.items()])


def _run_cells(benchmark: Benchmark, run: Ran, room: Path) -> Iterator[str]:
    report = full_report(benchmark, room)
    yield benchmark.name
    yield cell_of(run.status)
    yield "-" if run.seconds is None else f"{run.seconds:.0f}"
    yield "-" if run.others_cores is None else f"{run.others_cores:.2f}"
    yield f"`python -m {benchmark.command}`"
    yield _full_link(benchmark, room)
    if report is None:
        yield "-"
    else:
        yield plural(report.missed, "time") if report.has_verdicts else "has no verdicts"


def _section(benchmark: Benchmark, run: Ran) -> Iterator[str]:
    yield f"## {benchmark.name}\n\n{benchmark.asks} `python -m {benchmark.short}`\n"
    if not run.is_well:
        yield f"**{run.status}**\n"
    if any(claim.not_run == NEEDS_DATA for claim in _claims_of(run)):
        yield "Rows on public instances: `make bench DATA=FOLDER`.\n"
    if run.entries:
        yield markdown(run.entries)
