"""Run the short form of every benchmark and write their claims to benchmarks/REPORT.md.

Usage: python -m benchmarks [--data FOLDER] [--only NAMES] [--output FILE]

Benchmarks run one after the other, since they measure times. The page is written after each. The
exit status is 1 if a benchmark failed, whether or not bars were reached.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness import CLAIM_COLUMNS, Claim, data_folder, heading, load_claims, table, tell

LIMIT_S = {
    "schedule": 900.0,
    "rivals": 900.0,
    "executor": 900.0,
    "prediction": 1200.0,
    "sync": 1200.0,
}
"""The benchmarks, and the seconds after which each is stopped."""
WITH_DATA = ("schedule", "rivals")
"""Benchmarks that have rows on public instances."""


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=data_folder, help="folder of the public instances")
    parser.add_argument("--only", nargs="+", choices=list(LIMIT_S), default=list(LIMIT_S))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "REPORT.md")
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    failed: list[str] = []
    for name in options.only:
        tell(f"{name} …")
        claims, error = _claims(name, options.data)
        rows += [(*claim.cells, f"[{name}]({name.upper()}.md)") for claim in claims]
        failed += [f"- {name}: {error}"] if error else []
        options.output.write_text(_page(rows, failed))
    return int(bool(failed))


def _claims(name: str, data: Path | None) -> tuple[list[Claim], str]:
    """Run a benchmark's short form; return its claims, and why it failed if it did."""
    words = ["-m", f"benchmarks.{name}", "--short"]
    if data is not None and name in WITH_DATA:
        words += ["--data", str(data.resolve())]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "claims.json"
        try:
            done = subprocess.run(
                [sys.executable, *words, "--output", str(found)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                timeout=LIMIT_S[name],
                check=False,
            )
            error = f"exit status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"stopped after {LIMIT_S[name]:g} s"
        return load_claims(found), error


def _page(rows: Sequence[tuple[str, ...]], failed: Sequence[str]) -> str:
    title = heading("All claims", "python -m benchmarks")
    about = "Each benchmark's short form checks the bars of its full form on fewer instances.\n"
    problems = [f"Not run to the end:\n\n{chr(10).join(failed)}\n"] if failed else []
    return "\n".join([title, about, *problems, table((*CLAIM_COLUMNS, "page"), rows)])


if __name__ == "__main__":
    sys.exit(main())
