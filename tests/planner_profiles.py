"""Files in the formats of Sailor, Metis and Galvatron, with figures of our own.

Their repositories have the real ones; nothing of these is kept here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Seconds of forward, backward and optimizer step of layers 0 to 3.
TIMES = ((0.001, 0.0, 0.0005), (0.004, 0.010, 0.0005), (0.004, 0.012, 0.0005), (0.002, 0.006, 0.0))
# Bytes of parameters, outputs and stash of those layers, for one sample.
SIZES = ((4000, 800, 800), (8000, 800, 24_000), (8000, 800, 24_000), (2000, 8, 1600))


def write(path: Path, data: Any) -> Path:
    """Write data as JSON, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def sailor_times(scale: float = 1.0) -> dict[str, list[float]]:
    """Seconds of all layers."""
    return {str(index): [scale * value for value in row] for index, row in enumerate(TIMES)}


def sailor_profile() -> dict[str, Any]:
    """Two microbatch sizes; the larger one of two tensor degrees."""
    return {
        "4": {"1": sailor_times(), "2": sailor_times(0.6)},
        "1": {"1": sailor_times(0.3)},
    }


def sailor_sizes() -> dict[str, Any]:
    """One model; a GPU of a group of two has half of the parameters and of the stash."""
    names = ("params_bytes", "act_output_bytes", "act_mem_bytes")
    whole = {str(index): dict(zip(names, row, strict=True)) for index, row in enumerate(SIZES)}
    half = {
        index: {name: value if "output" in name else value // 2 for name, value in row.items()}
        for index, row in whole.items()
    }
    return {"TINY": {"1": whole, "2": half}}


def sailor_folder(folder: Path, profile: Mapping[str, Any] | None = None) -> Path:
    """The profile of one GPU below the sizes, as in Sailor's repository."""
    write(folder / "Planner/llm_info.json", sailor_sizes())
    path = folder / "Planner/sailor_planner/profiles/TINY/X-80/profile.json"
    return write(path, sailor_profile() if profile is None else profile)


def sailor_links(inter: object = None) -> dict[str, Any]:
    """Constant 10 GB/s between hosts and 100 GB/s inside, whatever the size."""
    outer = {"1": [[0.0, 0.0, 10.0], 1e10], "2": [[0.0, 0.0, 20.0], 2e10]}
    inner = {"2": [[0.0, 0.0, 100.0], 1e11], "4": [[0.0, 0.0, 200.0], 2e11]}
    slow = {"1": [[0.0, 0.0, 2.0], 2e9]}
    return {
        "inter": {"X-80": outer if inter is None else inter, "Y-8": slow},
        "intra": {"X-80": inner},
    }


def metis_profile(**execution: object) -> dict[str, Any]:
    """Three layers."""
    times = {"total_time_ms": 40.0, "layer_compute_total_ms": [3.0, 18.0, 6.0], **execution}
    return {
        "model": {
            "model_name": "TINY",
            "num_layers": 3,
            "parameters": {
                "total_parameters_bytes": 18_000,
                "parameters_per_layer_bytes": [4000, 8000, 6000],
            },
        },
        "execution_time": times,
        "execution_memory": {"total_memory": 90, "layer_memory_total_mb": [20, 40, 30]},
    }


def galvatron_folder(folder: Path, **times: float | None) -> Path:
    """Times of a block and of the rest for one sample, sizes beside them."""
    found = {
        "layernum[2]_bsz2_seq64": 30.0,
        "layertype_0_bsz2_seq64": 4.0,
        "layertype_other_bsz2_seq64": 3.0,
        "layertype_0_bsz8_seq64": 3.5,
        "layertype_other_bsz8_seq64": 2.5,
        **times,
    }
    memory = {
        "1_1_8_sp": {"layernum[1]_bsz8_seq64_rank0_ms": 900.0},
        "layertype_0_sp": {
            "64": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 5.0, "2": 2.5}}
        },
        "other_memory_pp_off_sp": {"64": {"model_states": {"1": 160.0}, "activation": {"1": 7.0}}},
    }
    write(folder / "memory_profiling_bf16_tiny_all.json", memory)
    path = folder / "computation_profiling_bf16_tiny_all.json"
    return write(path, {key: value for key, value in found.items() if value is not None})
