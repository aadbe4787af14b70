"""How much faster are plans than those of published planners and of even layouts?

Sections: ``profiles`` plans public profiles (folders pipedream and dapple of --data) on the sample
clusters and on random ones; ``groups`` plans tensor-parallel groups beside the best even layout of
tensor, pipeline and data parallelism. All plans are timed by one simulator, and searches have a
deterministic limit. With --published, settings that others published are planned instead, with a
limit of --seconds: ``sailor``, ``layouts``, ``metis`` and ``traces``; the module of each says which
files it reads.
Rows are kept in --keep as they are known, and a later call goes on from them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness import Section, data_folder, run
from benchmarks.rivals import groups, layouts, metis, pairs, published, traces

SECTIONS: dict[str, Section] = {"profiles": pairs.section, "groups": groups.section}
PUBLISHED: dict[str, Section] = {
    "sailor": published.section,
    "layouts": layouts.section,
    "metis": metis.section,
    "traces": traces.section,
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time-limit", type=float, metavar="S", help="of each search")
    parser.add_argument("--every", type=int, default=pairs.STRIDE, metavar="N", help="profiles")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep rows; go on from them")
    parser.add_argument("--published", type=data_folder, help="folder of rivals' own settings")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="CPU, of --published's searches"
    )


if __name__ == "__main__":
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--published")
    sections = PUBLISHED if first.parse_known_args()[0].published else SECTIONS
    sys.exit(run("benchmarks.rivals", __doc__, sections, _options))
