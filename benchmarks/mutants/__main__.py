"""Measure how many small faults in the code of rooms their tests notice."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # a forked child has one thread alone

from benchmarks.mutants.mutations import sample  # noqa: E402
from benchmarks.mutants.report import render  # noqa: E402
from benchmarks.mutants.rooms import ROOMS  # noqa: E402
from benchmarks.mutants.session import run_mutants  # noqa: E402
from benchmarks.reporting.report import heading  # noqa: E402


def main() -> None:
    """Mutate a sample, run the tests and print a Markdown report."""
    parser = _parser()
    arguments = parser.parse_args()
    root, names = Path.cwd(), arguments.rooms.split(",")
    unknown = [name for name in names if name not in ROOMS]
    if unknown:
        parser.error(f"--rooms: {', '.join(unknown)} is not known; choose from {', '.join(ROOMS)}")
    files = {path: name for name in names for path in _modules(root, name)}
    mutants = sample(files, arguments.sample, arguments.seed)
    outcomes, broken = run_mutants(mutants, ROOMS, root, arguments.budget, _say)
    print(heading("Mutation testing", " ".join(["python -m benchmarks.mutants", *sys.argv[1:]])))
    print(render(outcomes, broken, root, arguments.seed, arguments.budget))


def _modules(root: Path, room: str) -> list[Path]:
    """Return the files of a room.

    Raises:
        FileNotFoundError: where there is none, so that a room that moved is not left out.
    """
    found = {pattern: sorted(root.glob(pattern)) for pattern in ROOMS[room].modules}
    for pattern, paths in found.items():
        if not paths:
            raise FileNotFoundError(
                f"{pattern}: no such file in {root}; benchmarks/mutants/rooms.py says where "
                f"the code of {room} is"
            )
    return [path for paths in found.values() for path in paths]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("--rooms", default=",".join(ROOMS), help="rooms, separated by commas")
    parser.add_argument("--sample", type=int, default=300, help="mutants to try (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="CPU seconds of tests a mutant (default 10)"
    )
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
