"""Every benchmark in its short form, on one page.

Usage: python -m benchmarks.report_all [--data FOLDER] [--rows NAMES] [--output FILE] [--jsonl FILE]

Runs them one after the other (times are measured), each in a process of its own, and writes
benchmarks/REPORT.md after each, whole or not at all; Ctrl-C keeps what there is. With --rows, and
without --output, the page is printed: a part does not take the place of the whole. Takes about 50
minutes on two cores that do nothing else. The status is 1 if one of them failed, whatever bars were
reached, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.catalogue import BENCHMARKS, ROOM, Benchmark
from benchmarks.reporting.page import page
from benchmarks.reporting.report import chosen_sections
from benchmarks.reporting.running import Ran, run
from planner import PipeplanError
from planner.records.document import require_file_path, write_atomically

INTERRUPTED = 130
STOPS = (signal.SIGINT, signal.SIGTERM)
REPORT = ROOM / "REPORT.md"


def main(words: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> int:
    """Run what the command line asks for; returns the exit status."""
    options = _parser(benchmarks).parse_args(words)
    # A request to end takes the way of Ctrl-C; a shell that starts us behind its back ignores both.
    before = [(one, signal.signal(one, signal.default_int_handler)) for one in STOPS]
    try:
        if options.output is None and not options.rows:
            options.output = REPORT
        chosen = _chosen(options, benchmarks)
        return _run_all(chosen, options)
    except PipeplanError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        for one, handler in before:
            signal.signal(one, handler)


def _parser(benchmarks: Sequence[Benchmark]) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.report_all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--data", type=Path, help="folder of the public instances")
    found.add_argument("--rows", help="some only, of " + ",".join(b.name for b in benchmarks))
    found.add_argument("--output", type=Path, help="default benchmarks/REPORT.md")
    found.add_argument("--jsonl", type=Path, help="write all claims to this file too")
    return found


def _chosen(options: argparse.Namespace, benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """Return the benchmarks to run; wrong options are refused before the first starts.

    Raises:
        PipeplanError: naming the option that is wrong.
    """
    if options.data is not None and not options.data.is_dir():
        raise PipeplanError(f"--data {options.data}: no such folder; leave it out to do without")
    for path in (options.output, options.jsonl):
        if path is not None:
            require_file_path(path)
    names = chosen_sections(options.rows, [benchmark.name for benchmark in benchmarks])
    return [benchmark for benchmark in benchmarks if benchmark.name in names]


def _run_all(chosen: Sequence[Benchmark], options: argparse.Namespace) -> int:
    begin_s = time.monotonic()
    runs: dict[str, Ran] = {}
    for number, benchmark in enumerate(chosen, 1):
        _tell(f"[{number} of {len(chosen)}] {benchmark.name}: {benchmark.asks}")
        ran = run(_words(benchmark, options.data), benchmark.limit_s)
        runs[benchmark.name] = ran
        if ran.is_interrupted:
            rest = [b.name for b in chosen if b.name not in runs]
            runs |= dict.fromkeys(rest, Ran("not run: interrupted before"))
        _write(chosen, runs, options, time.monotonic() - begin_s)
        _tell(f"[{number} of {len(chosen)}] {benchmark.name}: {ran.status}, {ran.seconds:.0f} s")
        if ran.is_interrupted:
            break
    if options.output is None:
        print(_page(chosen, runs, options, time.monotonic() - begin_s))
    else:
        _tell(f"wrote {options.output}")
    if any(ran.is_interrupted for ran in runs.values()):
        return INTERRUPTED
    return int(not all(ran.is_well for ran in runs.values()))


def _words(benchmark: Benchmark, data: Path | None) -> list[str]:
    given = [] if data is None or not benchmark.takes_data else ["--data", str(data.resolve())]
    return [*shlex.split(benchmark.short), *given]


def _page(
    chosen: Sequence[Benchmark],
    runs: Mapping[str, Ran],
    options: argparse.Namespace,
    wall_s: float,
) -> str:
    command = "python -m benchmarks.report_all"
    command += " --data DATA" if options.data else ""
    command += f" --rows {options.rows}" if options.rows else ""
    return page(command, chosen, runs, wall_s)


def _write(
    chosen: Sequence[Benchmark],
    runs: Mapping[str, Ran],
    options: argparse.Namespace,
    wall_s: float,
) -> None:
    if options.output is not None:
        write_atomically(options.output, _page(chosen, runs, options, wall_s))
    if options.jsonl is not None:
        lines = [
            json.dumps({"benchmark": name, **entry.model_dump(mode="json")})
            for name, ran in runs.items()
            for entry in ran.entries
        ]
        write_atomically(options.jsonl, "".join(f"{line}\n" for line in lines))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
