"""How far the roofline is off published GPU throughput, and how soon costs are there.

``python -m benchmarks.roofline`` prints the report; ``--short [--json] [--claims FILE]`` claims.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.catalogue import (
    ROOFLINE_OTHERS_BAR,
    ROOFLINE_SPEED_BAR_S,
    ROOFLINE_TRANSFORMERS_BAR,
)
from benchmarks.reporting.claims import (
    Claim,
    Entry,
    LeftOut,
    add_short_options,
    details,
    is_short,
    tell,
)
from benchmarks.reporting.report import heading, write_table
from benchmarks.roofline import run as full
from benchmarks.roofline.public import DLE, MPT, PUBLISHED, predicted_s
from benchmarks.roofline.run import published_section, speed_section

MPT_SAID = "llm-foundry's published throughput (2023)"
NVIDIA_SAID = "DeepLearningExamples' published throughput"


def entries() -> Iterator[Entry]:
    """Claims and tables."""
    yield from _published()
    yield from _speed()
    yield LeftOut(text="Llama-70B")


def _published() -> Iterator[Entry]:
    for claim, held_out, note in (
        ("transformers on A100 and H100 that the presets were fitted to", False, "no test"),
        ("transformers on A100-40GB, held out of the fit of the presets", True, "a test"),
    ):
        rows = [row for row in PUBLISHED if row.held_out == held_out and row.source == MPT]
        off = [abs(predicted_s(row) / row.seconds - 1) for row in rows]
        yield Claim(
            claim=f"{claim}: worst error of a microbatch's time",
            source=MPT_SAID,
            sense="at most",
            bar=ROOFLINE_TRANSFORMERS_BAR,
            figure=max(off),
            unit="%",
            regime=f"{len(rows)} published figures",
            note=f"{note}; median {median(off):.1%}",
        )
    rows = [row for row in PUBLISHED if row.source == DLE]
    ratios = [predicted_s(row) / row.seconds for row in rows]
    yield Claim(
        claim="ResNet-50 on A100 and V100, which the presets were fitted to: worst factor off",
        source=NVIDIA_SAID,
        sense="at most",
        bar=ROOFLINE_OTHERS_BAR,
        figure=max(max(ratio, 1 / ratio) for ratio in ratios),
        regime=f"{len(rows)} published figures",
        note="no test",
    )
    cells = [full.published_cells(row) for row in PUBLISHED]
    yield details("Published throughput of GPUs", full.PUBLISHED_COLUMNS, cells)


def _speed() -> Iterator[Entry]:
    found = full.speed("models.llama:llama2_7b")
    yield Claim(
        claim="from nothing to the costs of every layer of Llama-7B",
        source="our own bar",
        sense="at most",
        bar=ROOFLINE_SPEED_BAR_S,
        figure=found.trace_s + found.costs_s,
        unit="s",
        regime=f"{found.layers} layers on {found.presets} presets",
    )


COMMAND = "python -m benchmarks.roofline"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = _parser().parse_args(arguments)
    if options.json and not options.short:
        _parser().error("--json goes with --short")
    if is_short(_parser(), options):
        tell(entries(), options.claims, as_json=options.json)
        return
    write_table(_report(), options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--output", type=Path, help="write the report to this file")
    parser.add_argument("--json", action="store_true", help="with --short: print JSON lines")
    add_short_options(parser)
    return parser


def _report() -> str:
    title = heading("The roofline against published throughput", COMMAND)
    return "\n".join([title, published_section(), speed_section()])


if __name__ == "__main__":
    sys.exit(main())
