"""Times of whole stages against the sums of their layers' profiles, in one process.

Usage:
    python -m benchmarks.prediction.whole_stages [--models NAMES] [--rounds N] [--output FILE]

Training by a plan has many sources of error; this has one, the profile of single layers. Each
model is cut in halves. In every round each half runs as a stage, and each kind of its layers is
profiled, on one thread: what the machine does meanwhile both have alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.prediction.plans import MODELS, Model
from benchmarks.reporting.report import heading, table
from executor.distributed.host_tuning import keep_freed_memory
from executor.profiling.kinds import alike
from executor.profiling.layer_run import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OPERATIONS,
    WEIGHT_GRADIENT,
    LayerRun,
    entries,
    gradients,
    held,
    received,
)
from executor.profiling.measure import CacheSweep, Patience, measured, timed_round
from executor.profiling.sizes import SizedModel, sized_models
from planner.model.measured_costs import SizedCosts

_CPU = torch.device("cpu")
_TIMED = 10
"""Repeats of a stage's operations in a round."""
_PATIENCE = Patience(seconds=0.3, least=5)
_KINDS = (
    ("F", FORWARD, "forward"),
    ("B", BACKWARD, "backward"),
    ("I", INPUT_GRADIENT, "input_gradient"),
    ("W", WEIGHT_GRADIENT, "weight_gradient"),
)


class Sample(NamedTuple):
    """One operation of one stage in one round; seconds."""

    whole_s: float
    layers_s: float


def stage_seconds(model: SizedModel, names: Sequence[str]) -> list[float]:
    """Return the seconds of the operations of layers that run as one stage, medians."""
    generator = torch.Generator().manual_seed(0)
    stage = model.cut(names, held(_CPU, generator), _CPU)
    run = LayerRun(
        stage,
        received(stage, _CPU, generator),
        entries(stage, model.batch, _CPU),
        gradients(stage, _CPU, generator),
        _CPU,
    )
    run.round()
    rounds = [timed_round(run.run, OPERATIONS, _CPU) for _ in range(_TIMED)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def profiled(model: SizedModel) -> Mapping[str, SizedCosts]:
    """Return what a profile says of each layer; those alike are measured once."""
    sweep = CacheSweep(_CPU, sum(weight.bytes for weight in model.graph.parameters))
    found = {}
    for kind in alike([model.signatures]):
        row = measured(model, kind[0], _CPU, _PATIENCE, sweep)
        found |= dict.fromkeys(kind, row)
    return found


def samples(model: Model, rounds: int) -> Mapping[tuple[str, str], list[Sample]]:
    """Return what each round measures, by half of the model and kind of operation."""
    sized = sized_models(model.factory, model.job, model.samples)[0]
    names = sized.layers.names
    halves = {"first": names[: len(names) // 2], "second": names[len(names) // 2 :]}
    found: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for _ in range(rounds):
        whole = {half: stage_seconds(sized, part) for half, part in halves.items()}
        layers = profiled(sized)
        for half, part in halves.items():
            for kind, place, field in _KINDS:
                sum_s = sum(getattr(layers[name], field).median_s for name in part)
                found[half, kind].append(Sample(whole[half][place], sum_s))
    return found


COLUMNS = ("model", "half", "operation", "whole stage ms", "sum of layers ms", "error", "spread")


def cells(model: str, half: str, kind: str, found: Sequence[Sample]) -> tuple[str, ...]:
    """The row of a stage's operation, of the median round."""
    ordered = sorted(found, key=lambda row: row.layers_s / row.whole_s)
    ratios = [row.layers_s / row.whole_s for row in ordered]
    median = ordered[len(ordered) // 2]
    return (
        *(model, half, kind, f"{median.whole_s * 1e3:.1f}", f"{median.layers_s * 1e3:.1f}"),
        f"{median.layers_s / median.whole_s - 1:+.1%}",
        f"{ratios[-1] / ratios[0] - 1:.0%}",
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    names = [model.name for model in MODELS]
    parser.add_argument("--models", default=",".join(names), help="of " + ", ".join(names))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the table to this file")
    options = parser.parse_args(words)
    chosen = options.models.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--models: {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = [
        cells(model.name, half, kind, found)
        for model in MODELS
        if model.name in chosen
        for (half, kind), found in samples(model, options.rounds).items()
    ]
    given = f"--models {options.models} --rounds {options.rounds}"
    command = f"python -m benchmarks.prediction.whole_stages {given}"
    text = heading("Whole stages against their layers", command) + "\n" + table(COLUMNS, rows)
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
