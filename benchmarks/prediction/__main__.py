"""How far off are predictions: of real training by profiled layers, and of published throughput?

Sections: ``trained`` trains five plans of every model in turns, by two ranks on two cores and by
four that share these, and predicts them from profiles of the model's layers between the turns;
``throughput`` compares the presets' roofline with published throughput of GPUs.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness import Section, run
from benchmarks.prediction import throughput, trained
from benchmarks.prediction.plans import MODELS

SECTIONS: dict[str, Section] = {"trained": trained.section, "throughput": throughput.section}


def _options(parser: argparse.ArgumentParser) -> None:
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, help="only these, of trained")
    parser.add_argument("--turns", type=int, metavar="N", help="of each plan")
    parser.add_argument("--steps", type=int, default=3, help="of each turn (default: 3)")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="of our plan")


if __name__ == "__main__":
    sys.exit(run("benchmarks.prediction", __doc__, SECTIONS, _options))
