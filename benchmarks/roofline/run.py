"""Sections of the report: errors of fitted layers and published throughputs, tracing speed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.catalogue import ROOFLINE_SPEED_BAR_S
from benchmarks.reporting.report import table
from benchmarks.roofline.fit import Errors, Timed, device_with, errors, fit, left_out
from benchmarks.roofline.measure import Sample
from benchmarks.roofline.public import PUBLISHED, SOURCES, Published, predicted_s
from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.job import Job
from planner.tracing.trace import trace

KINDS = "FB"
PUBLISHED_COLUMNS = (
    *("device", "model", "batch", "precision", "fitted to it"),
    *("published ms", "predicted ms", "error"),
)
SPEED_COLUMNS = (
    *("model, 4,096 tokens, bfloat16", "layers", "trace s", "of it processor s"),
    "costs s, presets",
)


def timed_rows(samples: Sequence[Sample], kinds: str = KINDS) -> list[Timed]:
    """Layers' times as shares of their model's."""
    total: dict[tuple[str, str], float] = {}
    for sample in samples:
        for kind in kinds:
            key = (sample.case.name, kind)
            total[key] = total.get(key, 0.0) + sample.alike * sample.seconds[kind]
    return [
        Timed(
            s.case.model if s.case.precision == "float32" else f"{s.case.model} {s.case.precision}",
            s.layer.name,
            s.layer,
            s.case.precision,
            kind,
            s.seconds[kind],
            s.alike * s.seconds[kind] / total[s.case.name, kind],
        )
        for s in samples
        for kind in kinds
        if s.seconds[kind] > 0
    ]


def fitted(rows: Sequence[Timed], start: DeviceType) -> tuple[dict[str, float], DeviceType]:
    """Figures fitted to the rows, and the device type that has them."""
    figures = fit(rows, start)
    return figures, device_with(start, figures)


def layers_section(samples: Sequence[Sample], machine: str, start: DeviceType) -> str:
    """Fitted figures, and errors with and without the model in the fit."""
    rows = timed_rows(samples)
    figures, device = fitted(rows, start)
    with_all, without = errors(rows, device), left_out(rows, start)
    columns = ["model", "forward", "backward", "median layer", "worst layer"]
    columns += [f"{name}, left out" for name in columns[1:]]
    per_model = []
    for group, out in without.items():
        own = errors([row for row in rows if row.group == group], device)
        per_model.append([group, *_cells(group, own), *_cells(group, out)])
    absolute = [abs(v) for v in with_all.whole.values()]
    absolute_out = [abs(v) for e in without.values() for v in e.whole.values()]
    single_out = [e.median for e in without.values()]
    return "\n".join(
        [
            "## Layers on this machine",
            "",
            f"Times of {machine}: {len(samples)} distinct layers, forward and whole backward, "
            "gradients summed; medians over rounds and equal layers. Figures of a device type "
            "fitted to them (least mean absolute logarithmic error, by share of the model's time) "
            "and the error of predictions, also for each model under figures fitted to all others. "
            "A layer counts if it takes 2 % of its model's time. Models called tiny have few "
            "layers, but widths of 512 to 1,024 (benchmarks/roofline/cases.py).",
            "",
            "Fitted: " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()) + ".",
            "",
            table(columns, per_model),
            f"Of whole models: median {median(absolute):.0%}, worst {max(absolute):.0%}; left out "
            f"of the fit {median(absolute_out):.0%} and {max(absolute_out):.0%}. Of layers: median "
            f"{with_all.median:.0%}, worst {with_all.worst:.0%} ({with_all.worst_name}); left out, "
            f"the median of the models' medians is {median(single_out):.0%}.",
            "",
            *_halves_line(samples, device),
        ]
    )


def _cells(group: str, found: Errors) -> list[str]:
    return [
        *(_percent(found.whole[group, kind]) for kind in KINDS),
        f"{found.median:.0%}",
        f"{found.worst:.0%}",
    ]


def _percent(error: float) -> str:
    return f"{error:+.0%}"


def _halves_line(samples: Sequence[Sample], device: DeviceType) -> Iterator[str]:
    """The halves of a split backward are predicted, not fitted."""
    found = errors(timed_rows(samples, "IW"), device)
    absolute = [abs(v) for v in found.whole.values()]
    yield (
        "Input and weight gradients of split backwards, to which nothing is fitted: of whole "
        f"models median {median(absolute):.0%}, worst {max(absolute):.0%}."
    )
    yield ""


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
    return [*told, *times, _percent(found / row.seconds - 1)]


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
