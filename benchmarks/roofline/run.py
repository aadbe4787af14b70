"""Sections of the report: errors of published throughputs, and the time that tracing takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.catalogue import ROOFLINE_SPEED_BAR_S
from benchmarks.reporting.report import table
from benchmarks.roofline.public import PUBLISHED, SOURCES, Published, predicted_s
from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.job import Job
from planner.tracing.trace import trace

PUBLISHED_COLUMNS = (
    *("device", "model", "batch", "precision", "fitted to it"),
    *("published ms", "predicted ms", "error"),
)
SPEED_COLUMNS = (
    *("model, 4,096 tokens, bfloat16", "layers", "trace s", "of it processor s"),
    "costs s, presets",
)


def published_section() -> str:
    """The presets of GPUs against published throughput."""
    rows = [published_cells(row) for row in PUBLISHED]
    notes = "\n".join(f"- {text}." for text in SOURCES.values())
    return (
        "## Published throughput of GPUs\n\nForward and backward of one microbatch by the presets, "
        "whose efficiencies were chosen by these figures where the table says so: there the error "
        "is no test.\n\n" + table(PUBLISHED_COLUMNS, rows) + "\n" + notes + "\n"
    )


def published_cells(row: Published) -> list[object]:
    """Return the cells of a row, in the order of :data:`PUBLISHED_COLUMNS`."""
    size = f"{row.model}, {row.sequence_length} tokens" if row.sequence_length else row.model
    told = [row.device, size, row.samples, row.precision, "no" if row.held_out else "yes"]
    found = predicted_s(row)
    times = f"{row.seconds * 1e3:.0f}", f"{found * 1e3:.0f}"
    return [*told, *times, f"{found / row.seconds - 1:+.0%}"]


def speed_section() -> str:
    """Return the section on the time that unmeasured costs take."""
    rows = [speed_cells(speed(f"models.llama:{name}")) for name in ("llama2_7b", "llama2_70b")]
    return (
        "## Time it takes\n\nFrom nothing to the costs of every layer; bar: "
        f"{ROOFLINE_SPEED_BAR_S:g} s for Llama-7B.\n\n" + table(SPEED_COLUMNS, rows)
    )


@dataclass(frozen=True)
class Speed:
    """The time that costs take if nothing is measured.

    Attributes:
        factory: of the model, for 4,096 tokens.
        layers: of it.
        trace_s, trace_cpu_s: of tracing, by the clock and of the processor.
        costs_s: of the costs of every layer on so many presets.
        presets: their number.
    """

    factory: str
    layers: int
    trace_s: float
    trace_cpu_s: float
    costs_s: float
    presets: int


def speed(factory: str) -> Speed:
    """Trace a model and cost its layers on every preset that has bfloat16."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    layers = trace(factory, Job(precision="bfloat16"), sequence_length=4096).record.layers
    trace_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    start_s = time.perf_counter()
    names = [n for n, kind in DEVICES.items() if "bfloat16" in kind.precisions]
    for name in names:
        for layer in layers:
            layer_times(layer, name, DEVICES[name], "bfloat16")
    costs_s = time.perf_counter() - start_s
    return Speed(factory, len(layers), trace_s, cpu_s, costs_s, len(names))


def speed_cells(row: Speed) -> list[object]:
    """Return the cells of a row, in the order of :data:`SPEED_COLUMNS`."""
    told = [f"{row.trace_s:.1f}", f"{row.trace_cpu_s:.1f}"]
    return [row.factory, row.layers, *told, f"{row.costs_s:.2f} on {row.presets}"]
