"""A cluster from a log of nccl-tests: bandwidth and latency of its ring or messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planner.cluster.device_types import KnownType, named_type
from planner.cluster.hardware import LinkType
from planner.costs.collectives import fewest_steps
from planner.errors import PipeplanError
from planner.interop.importing.imported import ImportedCluster, ImportOptions, Wire, cluster_of
from planner.interop.importing.nccl_tests import NcclLog, Test, line_of, read_log
from planner.topology.candidates import NETWORK
from planner.units import MEASURED_DIGITS, significant


def read_nccl_cluster(
    path: Path, options: ImportOptions, test: Test | None = None
) -> ImportedCluster:
    """Read a log into a cluster of the hosts and GPUs that it names.

    ``sendrecv_perf``: every rank sends to the next one and receives from the one before, so that a
    message takes latency + bytes / bandwidth of the slowest link between neighbours.
    ``all_reduce_perf``: a ring of r ranks moves 2(r-1)/r of the bytes over each link (Patarasuk and
    Yuan 2009), which bandwidth is worked out from; short ones take the fewest steps that the
    planner's own all-reduces have, so that it predicts what was measured.

    The slowest links are those between hosts where there are several. Links inside hosts carry as
    much at least; that they carry no more is assumed.

    Args:
        path: of the log.
        options: the type of all GPUs, if it is not the one that the log names.
        test: which test it is; None if the log tells.

    Raises:
        PipeplanError: if it cannot be read, or does not tell which test it is.
    """
    log = read_log(path)
    kind = test or log.test
    if kind is None:
        raise PipeplanError(
            f"{path}: does not show whether it is of all_reduce_perf or sendrecv_perf; say --from "
            "nccl-all-reduce or --from nccl-sendrecv"
        )
    if test is not None and log.test not in (None, test):
        raise PipeplanError(f"{path}: is of {log.test}_perf, not of {test}_perf")
    link, notes = _link(log, kind)
    devices, types = _devices(path, log, options.known_type)
    wires, switches, assumed = _wires(log, devices, link)
    cluster = cluster_of(
        path.stem,
        {name: known.name for name, known in devices.items()},
        {name: known.figures for name, known in types.items()},
        switches,
        wires,
    )
    of_types = (known.note for known in types.values() if known.note)
    return ImportedCluster(cluster, (*log.notes, *notes, *assumed, *of_types))


def _link(log: NcclLog, test: Test) -> tuple[LinkType, list[str]]:
    """Return the link that joins neighbours, for both directions."""
    line, count = line_of(log.rows), len(log.ranks)
    moved, steps = (
        (1.0, 1) if test == "sendrecv" else (2 * (count - 1) / count, fewest_steps(count))
    )
    notes = []
    if len(log.rows) == 1:
        notes.append(
            "there is one size: bandwidth is its bytes over its time, latency is left at 0; run "
            "the test with several sizes, such as -b 8 -e 1G -f 2"
        )
    elif line.short_s is None:
        notes.append(
            "no messages are so short that they all take about the same time, so that latency is "
            "left at 0; run the test from 8 bytes on, such as -b 8 -e 1G -f 2"
        )
    latency_us = (line.short_s or 0.0) / steps * 1e6
    return LinkType(
        bandwidth_gb_per_s=significant(moved / line.s_per_byte * 1e-9, MEASURED_DIGITS),
        latency_us=significant(latency_us, MEASURED_DIGITS),
        source="measured",
    ), notes


def _devices(
    path: Path, log: NcclLog, given: KnownType | None
) -> tuple[dict[str, KnownType], dict[str, KnownType]]:
    devices: dict[str, KnownType] = {}
    for number, rank in enumerate(log.ranks):
        name = f"{rank.host}/gpu{rank.device}"
        if name in devices:
            raise PipeplanError(
                f"{path}: two ranks share device {rank.device} of {rank.host}; run one rank per "
                f"device"
            )
        devices[name] = given or named_type(rank.called, f"{path}: rank {number}")
    return devices, {known.name: known for known in devices.values()}


def _wires(
    log: NcclLog, devices: Mapping[str, KnownType], link: LinkType
) -> tuple[list[Wire], list[str], list[str]]:
    """One switch inside a host; hosts joined in pairs or by a network.

    A way through several links has the latency measured once.
    """
    hosts: dict[str, list[str]] = {}
    for name, rank in zip(devices, log.ranks, strict=True):
        hosts.setdefault(rank.host, []).append(name)
    large = {host: names for host, names in hosts.items() if len(names) > 1}
    if len(hosts) == 1:
        names = next(iter(hosts.values()))
        if len(names) == 2:
            return [Wire((names[0], names[1]), link)], [], []
        half = link.model_copy(update={"latency_us": link.latency_us / 2})
        host = next(iter(hosts))
        return [Wire((name, host), half) for name in names], [host], [_ONE_SWITCH]
    inner = link.model_copy(update={"latency_us": 0.0, "source": "assumed"})
    wires = [Wire((name, host), inner) for host, names in large.items() for name in names]
    ends = [host if host in large else names[0] for host, names in hosts.items()]
    switches = list(large)
    if len(ends) == 2:
        wires.append(Wire((ends[0], ends[1]), link))
    else:
        half = link.model_copy(update={"latency_us": link.latency_us / 2})
        wires += [Wire((end, NETWORK), half) for end in ends]
        switches.append(NETWORK)
    return wires, switches, [_INNER] if large else []


_ONE_SWITCH = (
    "the test shows the slowest link of a ring; all GPUs of the host are assumed to share a switch "
    "of that speed"
)
_INNER = (
    "the links between hosts determine the times; links inside hosts are at least as fast and are "
    "assumed to be no faster; a test inside one host measures them"
)
