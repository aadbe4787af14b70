"""Do plans train as a single process does, as fast as torch's pipelines and as predicted?

Sections: ``parity`` trains random plans and compares them with plain torch; ``peers`` runs torch's
own schedules beside the executor; ``overhead`` runs published schedules with emulated compute;
``freedoms``, ``prediction`` and ``speed_up`` run plans over shaped links between network
namespaces, which needs root on Linux.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.executor import freedoms, on_testbed, overhead, parity, peers
from benchmarks.harness import Section, run

SECTIONS: dict[str, Section] = {
    "parity": parity.section,
    "peers": peers.section,
    "overhead": overhead.section,
    "freedoms": freedoms.section,
    "prediction": on_testbed.prediction,
    "speed_up": on_testbed.speed_up,
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainings", type=int, metavar="N", help="random trainings of parity")
    parser.add_argument("--seed", type=int, default=0, help="of the random trainings")
    parser.add_argument("--steps", type=int, default=12, help="of each emulated run")
    parser.add_argument(
        "--time-limit", type=float, default=8.0, metavar="S", help="of each search on the testbed"
    )


if __name__ == "__main__":
    sys.exit(run("benchmarks.executor", __doc__, SECTIONS, _options))
