"""Profiles of Metis (Um et al., USENIX ATC 2024; github.com/SamsungLabs/Metis).

``DeviceType.GPU_tpN_bsM.json`` has one array with an entry a layer for times, parameters and
memory; its README describes the fields. The cluster file has an object for each host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from planner.cluster.hardware import LinkType
from planner.errors import PipeplanError, shorten
from planner.interop.importing.imported import (
    Imported,
    ImportedCluster,
    ImportOptions,
    Wire,
    cluster_of,
)
from planner.interop.importing.profiled_chain import (
    Measured,
    ProfiledLayer,
    amount,
    entry,
    group_note,
    group_of,
    imported_chain,
    table,
)
from planner.records.document import read_json
from planner.topology.candidates import NETWORK

PRECISION: Final = "float32"
BACKWARD_SHARE = 2 / 3
"""Metis times both passes of a layer together; the backward has twice the products of the forward
(Narayanan et al. 2021, appendix)."""
_NAME = re.compile(r"DeviceType\.(.+)_tp(\d{1,4})_bs(\d{1,6})\.json")


def looks_like_metis(head: str) -> bool:
    """Return whether the beginning of a file has Metis's array of layer times."""
    return '"layer_compute_total_ms"' in head


def read_metis(path: Path, options: ImportOptions) -> Imported:
    """Read the layers of one file: one type of GPU, tensor degree and batch size.

    Raises:
        PipeplanError: naming what is missing or wrong.
    """
    gpu, size, samples = _name(path, options)
    data = table(read_json(path), str(path))
    layers = tuple(_layers(path, data, options.count("boundary_bytes", None), size))
    name, figures = group_of(gpu, options.named_device, size)
    model = data["model"].get("model_name")
    job_name = model if isinstance(model, str) and model else path.stem
    measured = Measured(name, figures, samples, PRECISION)
    return imported_chain(job_name, layers, measured, [*_notes(name), *group_note(size)])


def _name(path: Path, options: ImportOptions) -> tuple[str, int, int]:
    """Return GPU, tensor degree and batch size from the file's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise PipeplanError(
            f"{path}: Metis says GPU, tensor degree and batch size in the file's name, "
            "DeviceType.GPU_tpN_bsM.json; give the file that name"
        )
    gpu, size, samples = match[1], int(match[2]), int(match[3])
    if options.samples_per_microbatch not in (None, samples):
        raise PipeplanError(
            f"{path}: is of a batch of {samples}, not {options.samples_per_microbatch}; give the "
            f"file of bs{options.samples_per_microbatch}"
        )
    if (asked := options.count("tensor_parallel", 1)) != size:
        raise PipeplanError(
            f"{path}: is of tensor-parallel degree {size}, not {asked}; give the file of tp{asked}"
            f", or --given tensor_parallel={size} to import each group of {size} GPUs as one device"
        )
    return gpu, size, samples


def _layers(
    path: Path, data: dict[str, Any], boundary_bytes: int, size: int
) -> Iterator[ProfiledLayer]:
    model = table(entry(data, "model", str(path), "give Metis's file whole"), f"{path}: model")
    parts = {
        "parameters_per_layer_bytes": model.get("parameters"),
        "layer_compute_total_ms": data.get("execution_time"),
    }
    count = int(amount(model.get("num_layers"), f"{path}: num_layers", least=1))
    bytes_, times = (_array(path, name, part, count) for name, part in parts.items())
    for index in range(count):
        seconds = times[index] * 1e-3
        yield ProfiledLayer(
            name=f"layers.{index}",
            forward_s=seconds * (1 - BACKWARD_SHARE),
            backward_s=seconds * BACKWARD_SHARE,
            output_bytes=boundary_bytes,
            # Files of every degree have the parameters of the whole layer.
            parameter_bytes=int(bytes_[index]),
            stash_bytes=boundary_bytes * size,
        )


def _array(path: Path, name: str, part: Any, count: int) -> list[float]:
    field = f"{path}: {name}"
    values = table(part, field).get(name)
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else shorten(values)
        raise PipeplanError(
            f"{field}: expected {count} numbers, one for each of num_layers, found {found}; "
            "profile the missing layers"
        )
    return [amount(value, f"{field}[{index}]") for index, value in enumerate(values)]


def _notes(name: str) -> Iterator[str]:
    yield f"times of {name}, which a cluster file must define"
    yield "forward and backward were timed together: a third and two thirds"
    yield (
        "parameters count as float32; a layer keeps its output for its backward, as the memory of "
        "the file is not divided into parameters and activations"
    )
    yield (
        "times of the optimizer, of the batch generator and of reductions are not imported: a "
        "layer graph has no field for them"
    )


# --- clusters -------------------------------------------------------------------------------------


def looks_like_metis_cluster(head: str) -> bool:
    """Return whether the beginning of a file has Metis's bandwidths."""
    return '"inter_bandwidth"' in head and '"instance_type"' in head


def read_metis_cluster(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read a cluster file: an object with bandwidths in bytes/s and GiB of memory for each host.

    Raises:
        PipeplanError: naming what is missing or wrong.
    """
    count = options.count("gpus_per_host", None)
    devices: dict[str, str] = {}
    types: dict[str, Any] = {}
    wires: list[Wire] = []
    hosts = table(read_json(path), str(path))
    for host, row in hosts.items():
        field = f"{path}: {host}"
        kind = table(row, field).get("instance_type")
        if not isinstance(kind, str) or not kind:
            raise PipeplanError(f"{field}: instance_type: expected a name, found {shorten(kind)}")
        memory_gib = amount(row.get("memory"), f"{field}: memory", least=2)
        figures = options.named_device.model_copy(update={"memory_gib": memory_gib})
        if types.setdefault(kind, figures) != figures:
            raise PipeplanError(f"{field}: memory: {kind} has another memory on another host")
        names = [f"{host}/gpu{index}" for index in range(count)]
        devices |= dict.fromkeys(names, kind)
        wires += [Wire((name, host), _link(row, "intra_bandwidth", field)) for name in names]
        wires.append(Wire((host, NETWORK), _link(row, "inter_bandwidth", field)))
    cluster = cluster_of(path.stem, devices, types, [*hosts, NETWORK], wires)
    return ImportedCluster(
        cluster,
        (
            f"{count} GPUs on every host, as given; the file has no latency, which is left at 0",
            "peak throughput and memory bandwidth are those of the preset of --device-type",
        ),
    )


def _link(row: dict[str, Any], name: str, field: str) -> LinkType:
    bytes_per_s = amount(row.get(name), f"{field}: {name}", least=1)
    return LinkType(bandwidth_gb_per_s=bytes_per_s * 1e-9, latency_us=0.0, source="measured")
