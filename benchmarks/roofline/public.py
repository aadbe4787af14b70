"""Published training throughput of GPUs, and what the presets' roofline says of the same work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.job import Job
from planner.model.graph_record import Layer
from planner.tracing.trace import trace

MPT = "llm-foundry"
DLE = "DeepLearningExamples"
SOURCES = {
    MPT: "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md (2023): FSDP over "
    "8 to 64 GPUs, fused attention, no activation checkpointing; time a microbatch is its tokens "
    "over tokens a second a GPU, the optimizer and what FSDP does not hide included",
    DLE: "github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5 "
    "(container 21.03): one GPU, batch 256, channels last, optimizer and input included",
}
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


def predicted_s(row: Published, device: DeviceType | None = None) -> float:
    """Forward and backward by the roofline of a preset, or of another device type."""
    kind = device or DEVICES[row.device]
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
