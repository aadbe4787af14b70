"""What do strategies of synchronisation gain, against what their papers say?

Sections: ``loopback`` trains eight real pipelines with every strategy, some of them slow;
``simulated`` compares the strategies in larger worlds; ``choice`` is the regret of `--sync choose`.
Iterations a second are those of all pipelines in steady state. The time to the loss is from the
first step until the held-out loss of the pipelines' mean model is what overlapped all-reduce has
after half of its work. Ratios above 1 are faster, and are means over the seeds.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness import Section, run
from benchmarks.sync import real, simulated

SECTIONS: dict[str, Section] = {
    "loopback": real.section,
    "simulated": simulated.simulated,
    "choice": simulated.choice,
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, metavar="N", help="random seeds of each row")
    parser.add_argument("--steps", type=int, metavar="N", help="of each real training")
    parser.add_argument(
        "--settings", nargs="+", choices=sorted(real.SETTINGS), help="only these, of loopback"
    )


if __name__ == "__main__":
    sys.exit(run("benchmarks.sync", __doc__, SECTIONS, _options))
