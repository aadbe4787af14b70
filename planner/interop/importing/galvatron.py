"""Profiles of Galvatron (Miao et al., VLDB 2023; github.com/PKU-DAIR/Hetu-Galvatron, 2.x).

``computation_profiling_PRECISION_MODEL_all.json`` has milliseconds of a forward for one sample, by
batch size and sequence length: ``layertype_0`` is one block, ``layertype_other`` all the rest.
``memory_profiling_PRECISION_MODEL_all.json`` beside it has sizes in MiB. Neither says how many
blocks the model has. ``p2p_bandwidth_NnodesMgpus_per_node.json`` has MiB per millisecond between
neighbours, by pipeline size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from planner.cluster.hardware import LinkType
from planner.errors import PipeplanError
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
    imported_chain,
    table,
)
from planner.job import BYTES_OF
from planner.records.document import read_json
from planner.topology.candidates import NETWORK
from planner.units import MEASURED_DIGITS, significant

MIB = 2**20
BACKWARD_OVER_FORWARD = 2.0
"""``bct_fct_coe`` of Galvatron's ``cost_model_args.py``; only forwards are profiled."""
STATES_BYTES_PER_ELEMENT = 16
"""Weight, gradient and two moments, as in ``model_states`` of the memory profile, in float32."""
_COMPUTATION = re.compile(r"computation_profiling_(bf16|fp16|fp32)_(.+)\.json")
_PRECISION = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_TIME = re.compile(r"layertype_(0|other)_bsz(\d{1,6})_seq(\d{1,8})")
_OLD = re.compile(r'"(fwd_)?layertype_\d+"|"layernum\[\d+\]"|layertype_\d+_bsz\d+"')


def looks_like_galvatron(head: str) -> bool:
    """Return whether the beginning of a file has Galvatron's keys of layer times."""
    return bool(re.search(r'"(layernum\[\d+\]|layertype_\d+)_bsz\d+(_seq\d+)?"', head))


def read_galvatron(path: Path, options: ImportOptions) -> Imported:
    """Read the blocks of a model and all the rest, for one batch size.

    Raises:
        PipeplanError: naming what is missing or wrong.
    """
    match = _COMPUTATION.fullmatch(path.name)
    if match is None:
        raise PipeplanError(
            f"{path}: Galvatron says precision and model in the file's name, "
            "computation_profiling_PRECISION_MODEL.json; give the file that name"
        )
    precision, model = _PRECISION[match[1]], match[2]
    data = table(read_json(path), str(path))
    samples, sequence = _batch(path, data, options)
    name = options.text("gpu", options.device_type)
    layers = tuple(_layers(path, data, options, samples, sequence, precision))
    measured = Measured(name, options.named_device, samples, precision)
    return imported_chain(model, layers, measured, [*_notes(name, samples, sequence)])


def _batch(path: Path, data: dict[str, Any], options: ImportOptions) -> tuple[int, int]:
    """Return the batch size and sequence length to import."""
    found = {(int(match[2]), int(match[3])) for match in map(_TIME.fullmatch, data) if match}
    if not found:
        older = "older or " if any(_OLD.search(f'"{key}"') for key in data) else ""
        raise PipeplanError(
            f"{path}: has no layertype_0_bszM_seqN: it is of an {older}unfinished profile; run "
            "Galvatron's profiler of version 2 to its end"
        )
    sequences = sorted({sequence for _, sequence in found})
    sequence = options.count("sequence", sequences[0] if len(sequences) == 1 else None)
    batches = sorted(samples for samples, length in found if length == sequence)
    asked = options.samples_per_microbatch or (batches[0] if len(batches) == 1 else None)
    if asked not in batches:
        raise PipeplanError(
            f"{path}: sequences of {sequence} were profiled in batches of "
            f"{', '.join(map(str, batches)) or 'no size'}, not {asked}; choose one by "
            "--samples-per-microbatch"
        )
    return int(asked), sequence


def _layers(
    path: Path,
    data: dict[str, Any],
    options: ImportOptions,
    samples: int,
    sequence: int,
    precision: str,
) -> Iterator[ProfiledLayer]:
    of_block, of_rest = _sizes(path, sequence)
    boundary_bytes = options.count("boundary_bytes", None)
    element = BYTES_OF[precision]
    rows = [("other", "embedding", 0.0), *_blocks(options), ("other", "head", 1.0)]
    for kind, name, share in rows:
        key = f"layertype_{kind}_bsz{samples}_seq{sequence}"
        missing = "profile it, or choose another --samples-per-microbatch"
        # The file's time is of one sample.
        time_ms = samples * amount(entry(data, key, str(path), missing), f"{path}: {key}")
        forward_s = share * time_ms * 1e-3
        elements, stash = of_block if kind == "0" else of_rest
        yield ProfiledLayer(
            name=name,
            forward_s=forward_s,
            backward_s=forward_s * BACKWARD_OVER_FORWARD,
            output_bytes=boundary_bytes,
            parameter_bytes=int(elements * element * (1.0 if kind == "0" else 0.5)),
            stash_bytes=int(stash * samples * share),
        )


def _blocks(options: ImportOptions) -> list[tuple[str, str, float]]:
    return [("0", f"blocks.{index}", 1.0) for index in range(options.count("layers", None))]


def _sizes(path: Path, sequence: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return elements and bytes kept per sample, of a block and of all the rest."""
    beside = path.with_name(path.name.replace("computation_", "memory_", 1))
    if not beside.is_file():
        raise PipeplanError(f"{path}: sizes lie in {beside.name}, which must be beside it")
    data = table(read_json(beside), str(beside))
    block = _part(beside, data, "layertype_0", sequence)
    rest = _part(beside, data, "other_memory_pp_off", sequence)
    return (
        (
            _mib(beside, block, "parameter_size") / 4,
            _mib(beside, block, "tp_activation_per_bsz_dict", "1"),
        ),
        (
            _mib(beside, rest, "model_states", "1") / STATES_BYTES_PER_ELEMENT,
            _mib(beside, rest, "activation", "1"),
        ),
    )


def _part(beside: Path, data: dict[str, Any], name: str, sequence: int) -> dict[str, Any]:
    """Return sizes of a part, with sequence parallelism or without."""
    for key in (f"{name}_sp", name):
        if key in data:
            lengths = table(data[key], f"{beside}: {key}")
            found = entry(lengths, str(sequence), f"{beside}: {key}", "profile its memory")
            return table(found, f"{beside}: {key}.{sequence}")
    raise PipeplanError(f"{beside}: has neither {name} nor {name}_sp; run the memory profiler")


def _mib(beside: Path, part: dict[str, Any], *keys: str) -> float:
    """Return a size in bytes."""
    value: Any = part
    for key in keys:
        value = entry(table(value, f"{beside}: {keys[0]}"), key, f"{beside}", "profile it")
    return amount(value, f"{beside}: {'.'.join(keys)}") * MIB


def _notes(name: str, samples: int, sequence: int) -> Iterator[str]:
    yield (
        f"times of {name} for batches of {samples} and sequences of {sequence}; a cluster file "
        "must define that type"
    )
    yield "only forwards were timed: a backward takes twice as long, as Galvatron assumes"
    yield (
        "embedding and head were timed together: all time counts for the head, half of the "
        "parameters for each"
    )
    yield (
        "times are of tensor-parallel degree 1; other degrees are predicted by Galvatron, not "
        "measured, and not imported"
    )


# --- links ----------------------------------------------------------------------------------------

_P2P = re.compile(r"p2p_bandwidth_(\d{1,4})nodes_(\d{1,3})gpus_per_node\.json")


def looks_like_galvatron_links(head: str) -> bool:
    """Return whether the beginning of a file has bandwidths by pipeline size."""
    return re.match(r'\s*\{\s*"pp_size_\d+"', head) is not None


def read_galvatron_links(path: Path, options: ImportOptions) -> ImportedCluster:
    """Read hosts of GPUs with a switch each, joined by one network.

    Raises:
        PipeplanError: naming what is missing or wrong.
    """
    match = _P2P.fullmatch(path.name)
    if match is None:
        raise PipeplanError(
            f"{path}: Galvatron says hosts and GPUs in the file's name, "
            "p2p_bandwidth_NnodesMgpus_per_node.json (N nodes, underscore, M gpus); give the file "
            "that name"
        )
    hosts, per_host = int(match[1]), int(match[2])
    within = path.with_name(f"p2p_bandwidth_1nodes_{per_host}gpus_per_node.json")
    if not within.is_file():
        raise PipeplanError(f"{path}: links inside hosts lie in {within.name}; put it beside it")
    inner = _link(within, per_host)
    kind = options.text("gpu", options.device_type)
    ranks = product(range(hosts), range(per_host))
    names = {f"host{host}/gpu{gpu}": f"host{host}" for host, gpu in ranks}
    wires = [Wire((name, host), inner) for name, host in names.items()]
    switches = sorted(set(names.values()), key=len)
    if hosts > 1:
        # As many pipelines as GPUs of a host cross at once: the uplink carries all of them.
        outer = _link(path, hosts)
        shared = outer.bandwidth_gb_per_s * per_host
        uplink = outer.model_copy(update={"bandwidth_gb_per_s": shared})
        wires += [Wire((host, NETWORK), uplink) for host in switches]
        switches.append(NETWORK)
    cluster = cluster_of(
        path.stem, dict.fromkeys(names, kind), {kind: options.named_device}, switches, wires
    )
    return ImportedCluster(
        cluster,
        (
            "the file has no latency, which is left at 0",
            "bandwidths of all-reduces are in other files of Galvatron and not imported: ours are "
            "predicted from the links",
        ),
    )


def _link(path: Path, size: int) -> LinkType:
    """Return the link between neighbours of a pipeline over so many ranks."""
    data, key = table(read_json(path), str(path)), f"pp_size_{size}"
    value = amount(entry(data, key, str(path), "profile it"), f"{path}: {key}", least=1e-3)
    return LinkType(
        bandwidth_gb_per_s=significant(value * MIB / 1e6, MEASURED_DIGITS),
        latency_us=0.0,
        source="measured",
    )
