"""Profiles of Sailor (Strati et al., SOSP 2025; github.com/eth-easl/sailor).

Layer times lie in ``sailor/Planner/sailor_planner/profiles/MODEL/GPU/profile.json``: microbatch
size, tensor degree, layer, then seconds of forward, backward and optimizer step.
``sailor/Planner/simulations/profiles_tmp.json`` has the same of many models and GPUs. Sizes lie in
``sailor/Planner/llm_info.json``, for one sample and one GPU of a tensor-parallel group.
``sailor/providers/network_coeffs_all_homo.json`` has bandwidth as a polynomial of the message size
(``sailor/providers/gcp/model_networking.py``), of all GPUs of one host to those of another; the
size is that of each GPU's message (``sailor/profiling/networking/test_sendrecv.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.published.profiled_chain import (
    Imported,
    Measured,
    ProfiledLayer,
    amount,
    entry,
    group_note,
    group_of,
    imported_chain,
    skipped_note,
    table,
)
from planner.cluster.device_types import KnownType
from planner.cluster.hardware import DeviceType, LinkType
from planner.errors import PipeplanError, shorten
from planner.interop.importing.imported import (
    ImportedCluster,
    ImportOptions,
    Wire,
    cluster_of,
)
from planner.records.document import read_json
from planner.topology.candidates import NETWORK
from planner.units import MEASURED_DIGITS, significant

SIZES = "llm_info.json"
MOST_COUNT = 2**50
PRECISION: Final = "float32"
FORWARD, BACKWARD, OPTIMIZER = range(3)


@dataclass(frozen=True)
class SailorOptions(ImportOptions):
    """What the files do not say.

    ``given`` has ``model``, ``gpu`` and ``tensor_parallel``; of links ``hosts``, such as
    ``GH-96*4,V100-16``, and ``gpus_per_host``.
    """

    samples_per_microbatch: int | None = None

    @property
    def named_device(self) -> DeviceType:
        """The figures of the device type that was said.

        Raises:
            PipeplanError: if none was.
        """
        if self.known_type is None:
            raise PipeplanError(
                "device_type: the file has no peak throughput and memory bandwidth; add "
                "--device-type PRESET, the preset nearest to its GPU (`pipeplan detect --presets`)"
            )
        return self.known_type.figures

    def text(self, name: str, default: str | None) -> str:
        """Return a given value, or the default.

        Raises:
            PipeplanError: if there is neither.
        """
        value = self.given.get(name, default)
        if value is None:
            raise PipeplanError(
                f"{name}: the file does not say it; add --given {name}={name.upper()}"
            )
        return value

    def count(self, name: str, default: int | None) -> int:
        """Return a given count, or the default.

        Raises:
            PipeplanError: if there is neither, or the value is no count.
        """
        text = self.text(name, None if default is None else str(default))
        if not text.isdecimal() or not 1 <= int(text) <= MOST_COUNT:
            raise PipeplanError(
                f"--given {name}={shorten(text)}: expected a whole number from 1 to {MOST_COUNT}"
            )
        return int(text)


def read_sailor(path: Path, options: SailorOptions) -> Imported:
    """Read the layers of one model on one GPU, for one microbatch size and tensor degree.

    Raises:
        PipeplanError: naming what is missing or wrong.
    """
    size = options.count("tensor_parallel", 1)
    model, gpu, profile = _chosen(path, options)
    samples = _samples(path, profile, options)
    degrees = table(entry(profile, str(samples), str(path), _SAMPLES_REMEDY), f"{path}: {samples}")
    remedy = "choose one by --given tensor_parallel=N"
    times = table(
        entry(degrees, str(size), f"{path}: microbatches of {samples}", remedy),
        f"{path}: {samples}.{size}",
    )
    name, figures = group_of(gpu, options.named_device, size)
    layers = tuple(_layers(path, times, _sizes(path, model, size), samples, size))
    measured = Measured(name, figures, samples, PRECISION)
    notes = (
        f"times of {name}, which a cluster file must define; microbatches of {samples}",
        *group_note(size),
        *skipped_note(sorted(degrees, key=int), size),
        *_optimizer_note(times),
    )
    return imported_chain(model, layers, measured, notes)


_SAMPLES_REMEDY = "choose a profiled microbatch size by --samples-per-microbatch"


def _chosen(path: Path, options: SailorOptions) -> tuple[str, str, dict[str, Any]]:
    """Return model, GPU and what was profiled of them."""
    data = table(read_json(path), str(path))
    if next(iter(data)).isdecimal():
        folder = path.resolve().parent
        model = options.text("model", folder.parent.name)
        return model, options.text("gpu", folder.name), data
    model = options.text("model", None)
    of_model = table(entry(data, model, str(path), "--given model=NAME chooses one"), model)
    gpu = options.text("gpu", None)
    found = entry(of_model, gpu, f"{path}: {model}", "--given gpu=NAME chooses one")
    return model, gpu, table(found, f"{path}: {model}.{gpu}")


def _samples(path: Path, profile: Mapping[str, Any], options: SailorOptions) -> int:
    if options.samples_per_microbatch is not None:
        return options.samples_per_microbatch
    if len(profile) == 1:
        return int(next(iter(profile)))
    raise PipeplanError(
        f"{path}: has microbatches of {', '.join(sorted(profile, key=int))}; {_SAMPLES_REMEDY}"
    )


def _sizes(path: Path, model: str, size: int) -> dict[str, Any]:
    """Return the sizes of a model's layers, from the nearest folder above that has them."""
    for folder in path.resolve().parents:
        if (found := folder / SIZES).is_file():
            break
    else:
        raise PipeplanError(
            f"{path}: sizes of layers lie in Sailor's {SIZES}, which is in no folder above; keep "
            "the profile where Sailor's repository has it, below sailor/Planner"
        )
    models = table(read_json(found), str(found))
    degrees = table(entry(models, model, str(found), "--given model=NAME says which"), model)
    return table(
        entry(degrees, str(size), f"{found}: {model}", "choose another tensor_parallel"), model
    )


def _layers(
    path: Path, times: dict[str, Any], sizes: dict[str, Any], samples: int, size: int
) -> Iterator[ProfiledLayer]:
    if set(times) != set(map(str, range(len(times)))) or set(times) != set(sizes):
        odd = sorted(set(times) ^ set(map(str, range(len(sizes)))), key=str)
        raise PipeplanError(
            f"{path}: layers are missing or not in {SIZES}: {', '.join(odd[:8])}; both must have "
            f"the {len(sizes)} layers 0 to {len(sizes) - 1}"
        )
    for index in range(len(times)):
        field, row = f"{path}: layer {index}", times[str(index)]
        if not isinstance(row, list) or len(row) != 3:
            raise PipeplanError(
                f"{field}: expected seconds of forward, backward and optimizer step, found "
                f"{shorten(row)}"
            )
        forward_s, backward_s, _ = (amount(value, field) for value in row)
        of = table(sizes[str(index)], f"{SIZES}: layer {index}")
        bytes_ = {
            key: int(amount(of.get(key), f"{SIZES}: layer {index}: {key}"))
            for key in ("params_bytes", "act_output_bytes", "act_mem_bytes")
        }
        yield ProfiledLayer(
            name=f"layers.{index}",
            forward_s=forward_s,
            backward_s=backward_s,
            # Every GPU of a group has the whole output; each sends its share.
            output_bytes=bytes_["act_output_bytes"] * samples,
            parameter_bytes=bytes_["params_bytes"] * size,
            stash_bytes=bytes_["act_mem_bytes"] * samples * size,
        )


def _optimizer_note(times: Mapping[str, Any]) -> Iterator[str]:
    """Sailor writes the step of the model it profiled, of a few layers, beside each layer."""
    step_s = max(row[OPTIMIZER] for row in times.values())
    if step_s:
        yield (
            f"the optimizer's step of the profiled model took {step_s * 1e3:.3g} ms; which of the "
            "layers it had, the profile does not say: steps are predicted from parameters"
        )


# --- links ----------------------------------------------------------------------------------------

SCALES = ("inter", "intra")
SIZES_MB = tuple(2.0**power for power in range(11))
"""Sizes of each GPU's message, 1 MB to 1 GB, at which latency and bandwidth stand for the
polynomial."""
_LINKS = re.compile(r'\s*\{\s*"inter"\s*:\s*\{\s*"[^"]+"\s*:\s*\{\s*"\d+"\s*:\s*\[')
_HOSTS = re.compile(r"([^*,=\s]+)(?:\*(\d{1,4}))?")


@dataclass(frozen=True)
class _Line:
    """Seconds of a message: latency plus bytes over bandwidth."""

    latency_us: float
    gb_per_s: float
    worst: float


def _message_s(bytes_: float, senders: int, coefficients: Sequence[float]) -> float:
    """Return the seconds in which each sender sends this size, by Sailor's polynomial.

    It has the bandwidth of all senders together by log2 of what each sends, in MB.
    """
    return senders * bytes_ / (float(np.polyval(coefficients, log2(bytes_ / 1e6))) * 1e9)


def read_sailor_links(path: Path, options: SailorOptions) -> ImportedCluster:
    """Read hosts that are joined by one network, with the measured bandwidth of each.

    Raises:
        PipeplanError: naming what is missing or wrong.
    """
    size, per_host = options.count("tensor_parallel", 1), options.count("gpus_per_host", None)
    if per_host % size:
        raise PipeplanError(
            f"--given gpus_per_host={per_host}: is no multiple of tensor_parallel={size}"
        )
    data = table(read_json(path), str(path))
    inter, intra = (_scale(path, data, scale) for scale in SCALES)
    devices: dict[str, KnownType] = {}
    wires: list[Wire] = []
    worst = 0.0
    for host, gpu in enumerate(_hosts(options.text("hosts", None))):
        kind = KnownType(*group_of(gpu, options.named_device, size))
        names = [f"host{host}/gpu{index}" for index in range(per_host // size)]
        devices |= dict.fromkeys(names, kind)
        outer = _line(path, inter, "inter", gpu, size)
        worst = max(worst, outer.worst)
        end = names[0]
        if len(names) > 1:
            inner = _line(path, intra, "intra", gpu, 2 * size)
            end = f"host{host}"
            wires += [Wire((name, end), _half(inner)) for name in names]
        wires.append(Wire((end, NETWORK), _half(outer)))
    return ImportedCluster(
        cluster_of(path.stem, devices, wires), (_links_note(worst), *group_note(size))
    )


def _links_note(worst: float) -> str:
    return (
        "bandwidth by message size is replaced by latency and bandwidth, at most "
        f"{worst:.0%} off between 1 MB and 1 GB of each GPU; hosts are joined by one "
        "network, and two of them exchange data at the bandwidth of the slower one"
    )


def _scale(path: Path, data: dict[str, Any], scale: str) -> dict[str, Any]:
    return table(entry(data, scale, str(path), "give Sailor's file whole"), f"{path}: {scale}")


def _hosts(text: str) -> Iterator[str]:
    for part in text.split(","):
        match = _HOSTS.fullmatch(part.strip())
        if match is None or match[2] == "0":
            raise PipeplanError(
                f"--given hosts={shorten(text)}: expected GPU*COUNT, with commas between, such as "
                "GH-96*4 or V100-16*2,A100-40"
            )
        yield from [match[1]] * int(match[2] or 1)


def _line(path: Path, scale: dict[str, Any], name: str, gpu: str, gpus: int) -> _Line:
    """Return the line through the polynomial's times with the least squares of relative errors."""
    field = f"{path}: {name}.{gpu}"
    remedy = "these numbers of GPUs were measured; choose another tensor_parallel or gpus_per_host"
    by_count = table(entry(scale, gpu, f"{path}: {name}", "these GPUs were measured"), field)
    row = entry(by_count, str(gpus), field, remedy)
    if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], list):
        raise PipeplanError(
            f"{field}.{gpus}: expected coefficients and the peak, found {shorten(row)}; measure "
            "the network again"
        )
    coefficients = [amount(value, f"{field}.{gpus}", least=-1e18) for value in row[0]]
    # Half of the GPUs of one host send to the other half; between hosts, all of one send.
    senders = gpus // 2 if name == "intra" else gpus
    bytes_ = senders * np.array(SIZES_MB) * 1e6
    seconds = np.array([_message_s(size / senders, senders, coefficients) for size in bytes_])
    if not np.all(seconds > 0):
        raise PipeplanError(
            f"{field}.{gpus}: the coefficients give no positive bandwidth between 1 MB and 1 GB; "
            "measure the network again"
        )
    terms = np.stack([np.ones_like(bytes_), bytes_], axis=1) / seconds[:, None]
    latency_s, s_per_byte = np.linalg.lstsq(terms, np.ones_like(bytes_), rcond=None)[0]
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, 1 / float(np.mean(bytes_ / seconds))
    worst = float(np.max(np.abs((latency_s + s_per_byte * bytes_) / seconds - 1)))
    return _Line(
        significant(latency_s * 1e6, MEASURED_DIGITS),
        significant(1e-9 / s_per_byte, MEASURED_DIGITS),
        worst,
    )


def _half(line: _Line) -> LinkType:
    """Return one of the two links that a message passes, each with half of the latency."""
    return LinkType(
        bandwidth_gb_per_s=line.gb_per_s, latency_us=line.latency_us / 2, source="measured"
    )
