"""How much of the bounds of plans can anyone check, and how long does that take?

Usage:
    python -m benchmarks.proofs [--full] [--time-limit S] [--output FILE]
    python -m benchmarks.proofs --short [--claims FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.catalogue import PROOFS_ALONE_BAR, PROOFS_CHECK_BAR_S
from benchmarks.proofs.rows import COLUMNS, ProofRow, all_cases, proof_rows, short_cases
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    tell,
)
from benchmarks.reporting.report import heading, table

OURS = "ourselves"


def entries(time_limit_s: float) -> Iterator[Entry]:
    """Claims and the table of the short form.

    Args:
        time_limit_s: of each plan.
    """
    rows = list(proof_rows(short_cases(), time_limit_s))
    regime = f"{len(rows)} plans of zoo models on sample clusters, {time_limit_s:g} s each"
    yield Claim(
        claim="rows where the certificate alone proves the bound",
        source=OURS,
        sense="at least",
        bar=PROOFS_ALONE_BAR,
        figure=share_alone(rows),
        unit="%",
        regime=regime,
    )
    yield Claim(
        claim="checking a certificate, slowest",
        source=OURS,
        sense="below",
        bar=PROOFS_CHECK_BAR_S,
        figure=max(row.check_s for row in rows),
        unit="s",
        regime=regime,
    )
    yield details("Certificates", COLUMNS, [row.cells() for row in rows])
    yield LeftOut(text=f"{len(all_cases()) - len(rows)} of {len(all_cases())} plans")


def share_alone(rows: Sequence[ProofRow]) -> float:
    """Return the share of rows whose certificate alone proves the bound."""
    return sum(row.is_alone for row in rows) / len(rows)


def main() -> None:
    """Print the report, and write it if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs", description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="all models, with two stages a device on all clusters"
    )
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    add_short_options(parser)
    options = parser.parse_args()
    if is_short(parser, options):
        tell(entries(options.time_limit), options.claims)
        return
    rows = []
    cases = all_cases() if options.full else short_cases()
    for row in proof_rows(cases, options.time_limit):
        print(*row.cells(), sep="  ", flush=True)
        rows.append(row)
    report = _report(rows, options)
    print(report)
    if options.output is not None:
        options.output.write_text(report + "\n")


def _report(rows: Sequence[ProofRow], options: argparse.Namespace) -> str:
    flags = f"{'--full ' if options.full else ''}--time-limit {options.time_limit:g}"
    alone, slowest_s = share_alone(rows), max(row.check_s for row in rows)
    return "\n".join(
        [
            heading("Certificates of bounds", f"python -m benchmarks.proofs {flags}"),
            f"The certificate alone proves the bound in {alone:.0%} of {len(rows)} rows "
            f"(bar: {PROOFS_ALONE_BAR:.0%}); the slowest check takes {slowest_s:.2f} s of one "
            f"core (bar: {PROOFS_CHECK_BAR_S:g} s).\n",
            table(COLUMNS, [row.cells() for row in rows]),
        ]
    )


if __name__ == "__main__":
    main()
