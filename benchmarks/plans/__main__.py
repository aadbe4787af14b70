"""How good are plans, how soon, and how near their proved bounds? One build, or two side by side.

Usage:
    python -m benchmarks.plans [--published FOLDER] [--compare BUILD] [--output FOLDER]
    python -m benchmarks.plans --without walk --without polish
    python -m benchmarks.plans --rivals | --tiny | --schedules | --fits | --rules | --conflicts |
        --spaces

A run is a problem, a build, a limit in CPU seconds summed over threads and a random seed, in a
process of its own that calls the build's public functions. Rows are kept in the output folder, and
a run whose row is there is not repeated. --compare takes the checkout of another build, with its
interpreter in .venv, or an interpreter. --published takes a folder with the public profiles and
clusters of others (pipedream, dapple, sailor, qwen8b).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import data_folder
from benchmarks.plans import page
from benchmarks.plans.cases import PARTS, Case, freeze
from benchmarks.plans.runs import Build, Run, Series, Settings, run_all, this_build
from planner import PipeplanError

SECONDS = {
    "tiny": (2.0,),
    "schedules": (10.0,),
    "fits": (10.0,),
    "rules": (10.0,),
    "conflicts": (10.0,),
}
"""Limits of a part, where they are not those of the corpus."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.plans",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = found.add_mutually_exclusive_group()
    for name in PARTS:
        words = {"action": "store_const", "dest": "part", "const": name}
        parts.add_argument(f"--{name}", **words, help=(PARTS[name].__doc__ or "").split("\n")[0])
    found.set_defaults(part="corpus")
    found.add_argument("--compare", type=Path, metavar="BUILD", help="another build's checkout")
    found.add_argument("--alone", action="store_true", help="run the other build alone")
    found.add_argument("--without", action="append", default=[], help="parts of the search, a,b")
    found.add_argument("--problems", nargs="+", default=[""], help="words in names or groups")
    found.add_argument("--seconds", nargs="+", type=float, help="limits, in CPU seconds")
    found.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    found.add_argument("--jobs", type=int, default=1, help="runs at a time")
    found.add_argument("--workers", type=int, default=1, help="threads of a search")
    found.add_argument("--clock", choices=("cpu", "wall", "work"), default="cpu")
    found.add_argument("--published", type=data_folder, metavar="FOLDER")
    found.add_argument("--output", type=Path, default=Path("plans_out"), help="folder of rows")
    found.add_argument("--page", type=Path, help="write the page to this file")
    found.add_argument("--freeze", action="store_true", help="trace what the corpus lacks")
    return found


def series_of(options: argparse.Namespace) -> list[Series]:
    """Return what is compared; the last one is what the others are compared with."""
    if options.alone and options.compare is None:
        raise PipeplanError("--alone: which build? give --compare BUILD as well")
    if options.alone:
        return [_other(options)]
    this = this_build()
    digest = this.digest()
    parts = [tuple(words.split(",")) for words in options.without]
    found = [*(Series(this, digest, words) for words in parts), Series(this, digest)]
    if options.compare is not None:
        found.append(_other(options))
    return found


def _other(options: argparse.Namespace) -> Series:
    build = Build.at(options.compare.absolute())
    return Series(build, build.digest())


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the problems of the part that one of the words is in.

    Raises:
        PipeplanError: if there is none.
    """
    found = [
        case
        for case in PARTS[options.part](options.published)
        if any(words in f"{case.group}: {case.name}" for words in options.problems)
    ]
    if not found:
        raise PipeplanError(f"--problems {' '.join(options.problems)}: no problem has such words")
    return found


def runs_of(
    cases: Sequence[Case], series: Sequence[Series], options: argparse.Namespace
) -> Iterator[Run]:
    """Yield all runs, so that the builds take turns."""
    settings = Settings(options.output, options.clock, options.workers)
    for seconds in options.seconds or SECONDS.get(options.part, (2.0, 20.0)):
        for seed in options.seeds:
            for number, case in enumerate(cases):
                for one in series if number % 2 else series[::-1]:
                    yield Run(options.part, case, one, seconds, seed, settings)


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if options.freeze:
        freeze()
        return 0
    try:
        series, cases = series_of(options), cases_of(options)
        runs = list(runs_of(cases, series, options))
        judges = list(dict.fromkeys(one.build for one in series))
        rows = list(run_all(runs, judges, options.jobs))
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    command = f"python -m benchmarks.plans {shlex.join(_told(sys.argv[1:]))}".rstrip()
    results = page.Results(cases, series, rows)
    text = page.report(command, results)
    if options.page:
        options.page.write_text(text)
    print(text)
    return 0


def _told(words: Sequence[str]) -> list[str]:
    """Return the words of a command without this machine's folders."""
    folders = {"--compare": "BUILD", "--published": "FOLDER"}
    told, skipped = [], {"--output", "--page", "--jobs"}
    for before, word in zip(["", *words], words, strict=False):
        if word not in skipped and before not in skipped:
            told.append(folders.get(before, word))
    return told


if __name__ == "__main__":
    sys.exit(main())
