"""The roofline in half a minute: kept times in place of measured ones, one model traced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import roofline as full
from benchmarks.claims import Claim, Entry, LeftOut, details
from benchmarks.roofline_cases import load
from benchmarks.roofline_fit import errors
from benchmarks.roofline_public import DLE, MPT, PUBLISHED, predicted_s
from planner.artifacts.presets import DEVICES

KEPT = Path(full.__file__).parent / "roofline_cpu.json"
TRANSFORMERS, OTHERS_FACTOR = 0.15, 2.0
"""Of README.md: transformers on A100 and H100 within 15 %, anything else within a factor of 2."""
MPT_SAID = "llm-foundry's published throughput (2023)"
NVIDIA_SAID = "DeepLearningExamples' published throughput"


def entries() -> Iterator[Entry]:
    """Claims and tables."""
    yield from _published()
    yield from _kept_layers()
    yield from _speed()
    yield LeftOut(text="measuring the layers anew on this machine")
    yield LeftOut(text="errors of models left out of the fit")
    yield LeftOut(text="Llama-70B")


def _published() -> Iterator[Entry]:
    for claim, held_out, note in (
        ("transformers on A100 and H100 that the presets were fitted to", False, "no test"),
        ("transformers on A100-40GB, which had no say in the presets", True, "a test"),
    ):
        rows = [row for row in PUBLISHED if row.held_out == held_out and row.source == MPT]
        off = [abs(predicted_s(row) / row.seconds - 1) for row in rows]
        yield Claim(
            claim=f"{claim}: worst error of a microbatch's time",
            source=MPT_SAID,
            sense="at most",
            bar=TRANSFORMERS,
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
        bar=OTHERS_FACTOR,
        figure=max(max(ratio, 1 / ratio) for ratio in ratios),
        regime=f"{len(rows)} published figures",
        note="no test",
    )
    cells = [full.published_cells(row) for row in PUBLISHED]
    yield details("Published throughput of GPUs", full.PUBLISHED_COLUMNS, cells)


def _kept_layers() -> Iterator[Entry]:
    machine, samples = load(KEPT)
    rows = full.timed_rows(samples)
    _, device = full.fitted(rows, DEVICES["CPU-core"])
    found = errors(rows, device)
    whole = [abs(error) for error in found.whole.values()]
    for claim, value in (
        ("whole models, forward and backward, figures fitted to them: median error", median(whole)),
        ("whole models, forward and backward, figures fitted to them: worst error", max(whole)),
        ("layers, figures fitted to them: median error", found.median),
    ):
        yield Claim(
            claim=claim,
            source="layers measured earlier",
            figure=value,
            unit="%",
            regime=f"{len(samples)} layers, {machine}",
        )


def _speed() -> Iterator[Entry]:
    found = full.speed("models.llama:llama2_7b")
    yield Claim(
        claim="from nothing to the costs of every layer of Llama-7B",
        source="our own bar",
        sense="at most",
        bar=full.SPEED_BAR_S,
        figure=found.trace_s + found.costs_s,
        unit="s",
        regime=f"{found.layers} layers on {found.presets} presets",
    )
