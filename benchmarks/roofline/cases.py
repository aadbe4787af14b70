"""The layers that are measured, and the file that keeps their times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.roofline.measure import Case, Sample, traced
from planner.errors import PipeplanError
from planner.records.document import read_json, write_atomically

FORMAT = "pipeplan-layer-times/1"
# Layers of real widths, few of each kind: equal ones take equal times.
CPU_CASES = (
    Case(
        "gpt_tiny",
        1,
        {"layers": 2, "width": 768, "heads": 12, "vocabulary": 8192, "sequence_length": 256},
    ),
    Case(
        "llama_tiny",
        1,
        {
            "layers": 2,
            "width": 1024,
            "heads": 8,
            "kv_heads": 4,
            "ffn": 2816,
            "vocabulary": 4096,
            "sequence_length": 256,
        },
    ),
    Case(
        "bert_tiny",
        4,
        {"layers": 2, "width": 768, "heads": 12, "vocabulary": 8192, "sequence_length": 64},
    ),
    Case(
        "t5_tiny",
        2,
        {
            "layers": 2,
            "width": 512,
            "heads": 8,
            "head_size": 64,
            "ffn": 2048,
            "vocabulary": 8192,
            "sequence_length": 128,
        },
    ),
    Case(
        "mixtral_tiny",
        1,
        {
            "layers": 2,
            "width": 512,
            "heads": 8,
            "kv_heads": 4,
            "ffn": 1024,
            "vocabulary": 4096,
            "sequence_length": 128,
            # Rows sorted by expert are products of unequal size, one after the other.
            "dispatch": False,
        },
    ),
    Case("gnmt_tiny", 4, {"layers": 3, "width": 512, "vocabulary": 8192, "sequence_length": 20}),
    Case("vit_base_16", 1),
    Case("resnet50", 2),
    Case("vgg16", 1, {"image_size": 112, "dropout": 0.0}),
    Case("unet", 1, {"image_size": 64}),
    Case("inception_v3", 2, {"image_size": 149}),
)
GPU_CASES = (
    Case("gpt2_small", 8, precision="bfloat16"),
    Case("gpt2_xl", 2, precision="bfloat16"),
    Case(
        "llama_tiny",
        2,
        {
            "layers": 2,
            "width": 4096,
            "heads": 32,
            "kv_heads": 32,
            "ffn": 11008,
            "vocabulary": 32000,
            "sequence_length": 2048,
        },
        "bfloat16",
    ),
    Case("bert_large", 16, precision="bfloat16"),
    Case("t5_base", 8, precision="bfloat16"),
    Case("vit_large_16", 32, precision="bfloat16"),
    Case("resnet50", 64, precision="bfloat16"),
    Case("unet", 8, precision="bfloat16"),
    Case("resnet50", 64),
    Case("gpt2_small", 4),
)


def save(samples: Sequence[Sample], cases: Sequence[Case], machine: str, path: Path) -> None:
    """Write the times; the layers are traced again when they are read."""
    rows = [
        {
            "case": {**vars(case), "arguments": dict(case.arguments)},
            "layers": [
                {"layer": s.layer.name, "alike": s.alike, "seconds": dict(s.seconds)}
                for s in samples
                if s.case == case
            ],
        }
        for case in cases
    ]
    data = {"format": FORMAT, "machine": machine, "cases": rows}
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def load(path: Path) -> tuple[str, list[Sample]]:
    """Return the machine and the samples that :func:`save` wrote.

    Raises:
        PipeplanError: if the file is another, or a model no longer has a layer.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PipeplanError(f"{path}: format: expected {FORMAT!r}; measure again")
    samples = []
    for row in data["cases"]:
        case = Case(**row["case"])
        layers = traced(case).layers
        for kept in row["layers"]:
            if kept["layer"] not in layers:
                raise PipeplanError(
                    f"{path}: {case.name} has no layer {kept['layer']!r} any more; measure again"
                )
            samples.append(Sample(case, layers[kept["layer"]], kept["alike"], kept["seconds"]))
    return data["machine"], samples
