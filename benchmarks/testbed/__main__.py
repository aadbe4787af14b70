"""Clusters made real on this machine, of network namespaces and shaped links; needs root.

Usage:
    python -m benchmarks.testbed run --cluster FILE [--plan FILE] [--torchrun] -- COMMAND
    python -m benchmarks.testbed clean

`run` starts COMMAND once a device, in the order of the plan's ranks, or of the cluster file without
a plan; {python} in it is this Python. `clean` removes what killed runs left behind.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.testbed.network import Testbed, leftovers, remove_namespace
from planner import Cluster, Plan
from planner.errors import PipeplanError

INTERRUPTED = 130


def main() -> int:
    """Return the exit status; of `run` it is that of the first rank that failed."""
    options = _parser().parse_args()
    # A request to end takes the way of Ctrl-C, which takes the testbed down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status: int = options.action(options)
        return status
    except PipeplanError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a command on every device")
    run.add_argument("--cluster", type=Path, required=True)
    run.add_argument("--plan", type=Path, help="take the devices from its ranks, in their order")
    run.add_argument("--torchrun", action="store_true", help="a torchrun agent a device")
    run.add_argument("--timeout", type=float, metavar="SECONDS")
    run.add_argument("command", nargs="+", help="after --; with --torchrun, torchrun's arguments")
    run.set_defaults(action=_run)
    clean = commands.add_parser("clean", help="remove what killed runs left behind")
    clean.set_defaults(action=_clean)
    return parser


def _run(options: argparse.Namespace) -> int:
    cluster = Cluster.load(options.cluster)
    devices = None if options.plan is None else list(Plan.load(options.plan).ranks)
    command = [part.replace("{python}", sys.executable) for part in options.command]
    with Testbed(cluster) as testbed:
        outcome = testbed.run(
            command,
            devices,
            with_torchrun=options.torchrun,
            timeout_s=options.timeout,
            echo=True,
        )
    return outcome.status


def _clean(options: argparse.Namespace) -> int:
    found = leftovers()
    for name in found:
        remove_namespace(name)
    print(f"removed {len(found)} namespaces" + "".join(f"\n  {name}" for name in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
