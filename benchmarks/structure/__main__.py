"""Print the structure of this tree as a Markdown table, or with the names behind it as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json

from benchmarks import ROOT
from benchmarks.structure.measure import measure
from benchmarks.structure.table import render


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print names beside numbers, as JSON")
    parser.add_argument(
        "--static",
        action="store_true",
        help="train nothing, and leave out the files on a microbatch's way",
    )
    arguments = parser.parse_args()
    structure = measure(ROOT, {} if arguments.static else _ways())
    as_json = json.dumps(dataclasses.asdict(structure), indent=2)
    print(as_json if arguments.json else render(structure))


def _ways() -> dict[str, list[str]]:
    from benchmarks.structure.way import files_on_the_way  # torch is loaded only if needed

    return {backward: files_on_the_way(ROOT, backward) for backward in ("whole", "split")}


if __name__ == "__main__":
    main()
