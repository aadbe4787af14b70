"""Clusters made real on this machine, of network namespaces and shaped links; needs root.

Usage:
    python -m benchmarks.testbed check --cluster FILE [--write measured.toml] [--output FILE]
    python -m benchmarks.testbed rules --cluster FILE [--output FILE]
    python -m benchmarks.testbed run --cluster FILE [--plan FILE] -- COMMAND
    python -m benchmarks.testbed clean
    python -m benchmarks.testbed --short [--json] [--claims FILE]

`check` measures every pair of devices over gloo against the file. `rules` measures how transfers
that meet share links, beside the simulator's rules. `run` starts COMMAND once a device, in the
order of the plan's ranks, or of the cluster file without a plan; {python} in it is this Python.
`clean` removes what killed runs left behind. `--short` checks one cluster and prints claims.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting.claims import add_short_options, is_short, tell
from benchmarks.reporting.report import write_table
from benchmarks.testbed import short
from benchmarks.testbed.check import check, report
from benchmarks.testbed.measured import measured_cluster
from benchmarks.testbed.network import Testbed, leftovers, remove_namespace
from benchmarks.testbed.transfer_rules import rules_report
from planner import Cluster, Plan
from planner.errors import PipeplanError
from planner.records.document import require_file_path

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status; of `run` it is that of the first rank that failed."""
    options = _parser().parse_args(arguments)
    if options.short == (options.action is not None):
        _parser().error("give a command, or --short")
    if options.json and not options.short:
        _parser().error("--json goes with --short")
    # A request to end takes the way of Ctrl-C, which takes the testbed down.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if is_short(_parser(), options):
            tell(short.entries(), options.claims, as_json=options.json)
            return 0
        status: int = options.action(options)
        return status
    except PipeplanError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="with --short: print JSON lines")
    add_short_options(parser)
    parser.set_defaults(action=None)
    commands = parser.add_subparsers()
    run = commands.add_parser("run", help="run a command on every device")
    run.add_argument("--cluster", type=Path, required=True)
    run.add_argument("--plan", type=Path, help="take the devices from its ranks, in their order")
    run.add_argument("--torchrun", action="store_true", help="a torchrun agent a device")
    run.add_argument("--timeout", type=float, metavar="SECONDS")
    run.add_argument("command", nargs="+", help="after --; with --torchrun, torchrun's arguments")
    run.set_defaults(action=_run)
    checking = commands.add_parser("check", help="measure every pair of devices")
    checking.add_argument("--cluster", type=Path, required=True)
    checking.add_argument("--repeats", type=int, default=5)
    checking.add_argument("--write", type=Path, help="write the measured cluster file")
    checking.add_argument("--output", type=Path, help="write the table to this file")
    checking.set_defaults(action=_check)
    rules = commands.add_parser("rules", help="measure how transfers share links")
    rules.add_argument("--cluster", type=Path, required=True)
    rules.add_argument("--repeats", type=int, default=5)
    rules.add_argument("--output", type=Path, help="write the tables to this file")
    rules.set_defaults(action=_rules)
    clean = commands.add_parser("clean", help="remove what killed runs left behind")
    clean.set_defaults(action=_clean)
    return parser


def _run(options: argparse.Namespace) -> int:
    cluster = Cluster.load(options.cluster)
    devices = None if options.plan is None else list(Plan.load(options.plan).ranks)
    command = [part.replace("{python}", sys.executable) for part in options.command]
    if command[0] == "python" and not options.torchrun:
        command[0] = sys.executable
    with Testbed(cluster) as testbed:
        outcome = testbed.run(
            command,
            devices,
            with_torchrun=options.torchrun,
            timeout_s=options.timeout,
            echo=True,
        )
    return outcome.status


def _check(options: argparse.Namespace) -> int:
    for path in (options.write, options.output):
        if path is not None:
            require_file_path(path)
    cluster = Cluster.load(options.cluster)
    with Testbed(cluster) as testbed:
        checks = check(testbed, options.repeats)
    write_table(report(cluster, checks, _command("check", options)), options.output)
    if options.write is not None:
        measured_cluster(cluster, checks).save(options.write)
    return 0


def _rules(options: argparse.Namespace) -> int:
    if options.output is not None:
        require_file_path(options.output)
    cluster = Cluster.load(options.cluster)
    write_table(rules_report(cluster, _command("rules", options), options.repeats), options.output)
    return 0


def _command(name: str, options: argparse.Namespace) -> str:
    return f"python -m benchmarks.testbed {name} --cluster {shlex.quote(str(options.cluster))}"


def _clean(options: argparse.Namespace) -> int:
    found = leftovers()
    for name in found:
        remove_namespace(name)
    print(f"removed {len(found)} namespaces" + "".join(f"\n  {name}" for name in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
