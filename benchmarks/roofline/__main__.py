"""How far the roofline is off: layers of the zoo on this machine, and published GPU throughput.

``python -m benchmarks.roofline`` measures, fits a device type's efficiencies to the times and
tells
its errors, also under figures fitted to all other models. ``--times FILE`` takes times that an
earlier run kept with ``--keep FILE``; ``--device cuda --device-type H100-80GB`` measures a GPU.
``--short [--json] [--claims FILE]`` takes the times kept with the benchmark and prints claims.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

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
from benchmarks.reporting.report import chosen_sections, heading, write_table
from benchmarks.roofline import run as full
from benchmarks.roofline.cases import CPU_CASES, GPU_CASES, load, save
from benchmarks.roofline.fit import errors
from benchmarks.roofline.measure import Sample, measure
from benchmarks.roofline.public import DLE, MPT, PUBLISHED, predicted_s
from benchmarks.roofline.run import layers_section, published_section, speed_section
from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICES
from planner.errors import PipeplanError

KEPT = Path(__file__).parent / "roofline_cpu.json"
MPT_SAID = "llm-foundry's published throughput (2023)"
NVIDIA_SAID = "DeepLearningExamples' published throughput"


def entries() -> Iterator[Entry]:
    """Claims and tables."""
    yield from _published()
    yield from _kept_layers()
    yield from _speed()
    yield LeftOut(text="measuring the layers again on this machine")
    yield LeftOut(text="errors of models left out of the fit")
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
    try:
        if is_short(_parser(), options):
            tell(entries(), options.claims, as_json=options.json)
            return
        write_table(_report(options), options.output)
    except PipeplanError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--rows", help="sections to run: layers, published, speed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--device-type", help="preset to start from; default CPU-core")
    parser.add_argument("--rounds", type=int, default=5, help="that count, of each model")
    parser.add_argument("--times", type=Path, help="take kept times in place of measuring")
    parser.add_argument("--keep", type=Path, help="keep the times in this file")
    parser.add_argument("--machine", help="what to call the machine; needed to keep times")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    parser.add_argument("--json", action="store_true", help="with --short: print JSON lines")
    add_short_options(parser)
    return parser


def _report(options: argparse.Namespace) -> str:
    device = _device(options.device)
    start = _start(options.device, options.device_type)
    sections: Mapping[str, Callable[[], str]] = {
        "layers": lambda: layers_section(*_samples(options, device), start),
        "published": published_section,
        "speed": speed_section,
    }
    names = chosen_sections(options.rows, sections)
    given = " ".join(
        f"--{name} {value}"
        for name, value in (("device-type", options.device_type), ("times", options.times))
        if value
    )
    title = heading("The roofline against measured times", f"{COMMAND} {given}".strip())
    return "\n".join([title, *(sections[name]() for name in names)])


def _device(name: str) -> torch.device:
    """The device to measure.

    Raises:
        PipeplanError: if the machine has none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise PipeplanError("--device cuda: torch finds no GPU here; leave it out for the CPU")
    torch.set_num_threads(1)
    return torch.device(name)


def _start(device: str, name: str | None) -> DeviceType:
    if name is None and device == "cuda":
        raise PipeplanError("--device-type: name the GPU's preset, whose peaks the fit starts from")
    name = name or "CPU-core"
    if name not in DEVICES:
        raise PipeplanError(f"--device-type {name!r}: choose from {', '.join(DEVICES)}")
    return DEVICES[name]


def _samples(options: argparse.Namespace, device: torch.device) -> tuple[list[Sample], str]:
    if options.times is not None:
        machine, samples = load(options.times)
        return samples, machine
    if options.keep is not None and not options.machine:
        raise PipeplanError("--keep: say with --machine what the times are of")
    cases = GPU_CASES if device.type == "cuda" else CPU_CASES
    samples = [sample for case in cases for sample in measure(case, device, options.rounds)]
    if options.keep is not None:
        save(samples, cases, options.machine, options.keep)
    return samples, options.machine or "this machine"


if __name__ == "__main__":
    sys.exit(main())
