"""Published training throughput of GPUs, and the presets' roofline of the same work.

Sources: github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md (2023): FSDP over 8
to 64 GPUs, fused attention, no activation checkpointing; the time of a microbatch is its tokens
over tokens a second a GPU, with the optimizer and what FSDP does not hide.
github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5 (container
21.03): one GPU, batch 256, channels last, with optimizer and input.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.harness import Claim, Result, Row
from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.job import Job
from planner.model.graph_record import Layer
from planner.tracing.trace import trace

MPT = "llm-foundry"
DLE = "DeepLearningExamples"
# Layers, width and heads of the MPT models; 50,368 tokens in the vocabulary.
MPT_SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
}


@dataclass(frozen=True)
class Published:
    """A published time of forward and backward of one microbatch.

    ``held_out`` rows were held out of the fit of the presets' efficiencies.
    """

    source: str
    device: str
    model: str
    samples: int
    precision: str
    seconds: float
    sequence_length: int = 0
    held_out: bool = False


def _mpt(
    device: str, rows: Sequence[tuple[str, int, int, int]], held_out: bool = False
) -> Iterator[Published]:
    """Build rows from (size, sequence length, microbatch, tokens per second per GPU)."""
    for size, length, samples, tokens_per_s in rows:
        seconds = samples * length / tokens_per_s
        yield Published(MPT, device, size, samples, "bfloat16", seconds, length, held_out)


def _resnet(device: str, precision: str, images_per_s: float) -> Published:
    return Published(DLE, device, "resnet50", 256, precision, 256 / images_per_s)


PUBLISHED = (
    *_mpt(
        "A100-80GB",
        [
            ("125m", 2048, 32, 141737),
            ("350m", 2048, 32, 58782),
            ("760m", 2048, 24, 32434),
            ("1b", 2048, 14, 20513),
            ("3b", 2048, 10, 10811),
            ("7b", 2048, 6, 4641),
            ("13b", 2048, 2, 2262),
            ("125m", 512, 128, 165681),
            ("125m", 16384, 4, 60040),
            ("350m", 8192, 8, 36569),
            ("1b", 8192, 3, 13814),
            ("3b", 8192, 3, 7695),
        ],
    ),
    *_mpt(
        "H100-80GB",
        [
            ("760m", 2048, 24, 67971),
            ("1b", 2048, 14, 45455),
            ("3b", 2048, 10, 24142),
            ("7b", 2048, 6, 10643),
            ("13b", 2048, 2, 4792),
            ("760m", 512, 96, 83749),
            ("1b", 8192, 3, 29157),
            ("3b", 8192, 3, 16578),
        ],
    ),
    *_mpt(
        "A100-40GB",
        [("3b", 2048, 6, 9736), ("3b", 4096, 2, 8777), ("3b", 8192, 1, 7149)],
        held_out=True,
    ),
    _resnet("A100-80GB", "float16", 2470),
    _resnet("V100-16GB", "float16", 1200),
    _resnet("V100-16GB", "float32", 367),
)


def section(options: argparse.Namespace) -> Result:
    """Published throughput of GPUs against the presets' roofline."""
    rows = [_row(row) for row in PUBLISHED]
    groups = {
        f"{device}: the presets were {'not fitted to it' if held_out else 'fitted to it'}": [
            row["error %"]
            for row, published in zip(rows, PUBLISHED, strict=True)
            if published.source == source and published.held_out == held_out
        ]
        for source, held_out, device in (
            (MPT, False, "transformers on A100-80GB and H100"),
            (MPT, True, "transformers on A100-40GB"),
        )
    }
    text = "worst error of a microbatch's published time"
    transformers = [
        Claim(f"{text}, {name}", max(map(abs, errors)), "llm-foundry", at_most=15.0, unit="%")
        for name, errors in groups.items()
    ]
    ratios = [1 + r["error %"] / 100 for r in rows if r["model"] == "resnet50"]
    factor = max(max(ratio, 1 / ratio) for ratio in ratios)
    text = "factor by which ResNet-50 on A100 and V100 is off, which the presets were fitted to"
    return Result(rows, [*transformers, Claim(text, factor, "DeepLearningExamples", at_most=2.0)])


def _row(row: Published) -> Row:
    found_s = _predicted_s(row)
    return {
        "device": row.device,
        "model": row.model,
        "tokens": row.sequence_length or None,
        "samples": row.samples,
        "precision": row.precision,
        "fitted to it": not row.held_out,
        "published ms": 1e3 * row.seconds,
        "predicted ms": 1e3 * found_s,
        "error %": 100 * (found_s / row.seconds - 1),
    }


def _predicted_s(row: Published) -> float:
    """Return forward and backward by the roofline of a preset."""
    kind = DEVICES[row.device]
    if row.source == MPT:
        layers, width, heads = MPT_SIZES[row.model]
        arguments = (("heads", heads), ("sequence_length", row.sequence_length), ("width", width))
        told = _layers(
            "models.gpt:gpt_tiny",
            row.samples,
            row.precision,
            (*arguments, ("layers", 1), ("vocabulary", 50368)),
        )
        count = {"h.0": layers}  # Equal layers are traced once.
    else:
        told, count = _layers("models.resnet:resnet50", row.samples, row.precision, ()), {}
    return sum(
        count.get(layer.name, 1) * (times.forward_s + times.backward_s)
        for layer in told
        for times in [layer_times(layer, "none", kind, row.precision)]
    )


@cache
def _layers(
    factory: str, samples: int, precision: str, arguments: tuple[tuple[str, int], ...]
) -> tuple[Layer, ...]:
    job = Job(samples_per_microbatch=samples, precision=precision)  # type: ignore[arg-type]
    return trace(factory, job, **dict(arguments)).record.layers
