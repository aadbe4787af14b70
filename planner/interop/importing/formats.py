"""The formats that can be imported, by name, and the detection of a file's format.

Profiles become layer graphs, what other tools tell of links becomes clusters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.importing.captured import plain_text
from planner.interop.importing.imported import (
    MOST_SAMPLES,
    Imported,
    ImportedCluster,
    ImportOptions,
)
from planner.interop.importing.nccl_cluster import read_nccl_cluster
from planner.interop.importing.nccl_tests import looks_like_nccl_tests
from planner.interop.importing.nccl_topology import (
    looks_like_nccl_topology,
    read_nccl_topology,
)
from planner.interop.importing.nvidia_table import looks_like_topology
from planner.interop.importing.nvidia_topology import read_topology_cluster
from planner.interop.importing.pcie import GIVEN_PORTS
from planner.interop.importing.profile_graph import PRECISION, ProfileGraph
from planner.interop.importing.profile_text import Profile, parse_profile
from planner.interop.importing.rocm_topology import looks_like_rocm_topology, read_rocm_cluster
from planner.job import Job
from planner.records.document import read_text
from planner.units import plural

_BATCH = re.compile(r"(?:^|[-_.])pbs[-_]?(\d{1,9})(?=[-_.]|$)", re.IGNORECASE)
_NODE_LINE = re.compile(r"^\s*\S+ -- .* -- .*forward_compute_time=", re.MULTILINE)
_ROUND_BYTES = 1000


def read_profile(path: Path, options: ImportOptions) -> Imported:
    """Read a profile of either tool; the syntax is the same.

    Raises:
        PipeplanError: naming line, field, value and remedy of all that cannot be read.
    """
    profile = parse_profile(read_text(path), str(path))
    draft = ProfileGraph(profile, options)
    samples, source = _samples(path, options)
    name = _model_name(path)
    return Imported(
        graph=draft.layer_graph(name, samples),
        # The profile does not say how a backward divides into input and weight gradient.
        job=Job(name=name, samples_per_microbatch=samples, precision=PRECISION, backward="whole"),
        notes=(source, *profile.notes, *draft.notes(), *_assumptions(profile, options)),
    )


def looks_like_profile(head: str) -> bool:
    """Return whether the beginning of a file has a node line."""
    return _NODE_LINE.search(head) is not None


def profile_batch(path: Path) -> int | None:
    """The batch size that the name of a DAPPLE profile holds as ``pbs-N``; None if it has none."""
    match = _BATCH.search(path.stem)
    return int(match[1]) if match and 1 <= int(match[1]) <= MOST_SAMPLES else None


def _samples(path: Path, options: ImportOptions) -> tuple[int, str]:
    """Return the samples per microbatch, and where the figure comes from."""
    given, named = options.samples_per_microbatch, profile_batch(path)
    if given is not None and named not in (None, given):
        return (
            given,
            f"{plural(given, 'sample')} per microbatch, as given; the file's name says {named}",
        )
    if given is not None:
        return given, f"{plural(given, 'sample')} per microbatch, as given"
    if named is not None:
        samples = plural(named, "sample")
        return named, f"{samples} per microbatch, from the file's name (pbs-{named})"
    return 1, (
        "the file does not say of how many samples its batch is; it counts as one sample, "
        "--samples-per-microbatch says otherwise"
    )


def _model_name(path: Path) -> str:
    """The file's name; PipeDream calls every file ``graph.txt`` and the folder by the model."""
    name = path.resolve().parent.name if path.stem == "graph" else path.stem
    return name[:100] or path.stem


def _assumptions(profile: Profile, options: ImportOptions) -> Iterator[str]:
    yield (
        f"times are those of {options.type_name} for the whole batch; other device types scale "
        f"by their {PRECISION} peak times efficiency"
    )
    yield (
        "backward is split half and half into input and weight gradient where a layer has both; "
        "a layer keeps its output for its backward"
    )
    sizes = [size for node in profile.nodes.values() for size in node.activation_bytes if size]
    if sizes and not any(size % _ROUND_BYTES for size in sizes):
        yield (
            f"every activation size is a multiple of {_ROUND_BYTES}: read as bytes, but they may "
            "be rounded, or be MiB times a million (up to 4.9% too small)"
        )


AUTO = "auto"
MOST_BYTES = 2**28
_HEAD_BYTES = 2**16
_LONG_NUMBER = re.compile(rb"[0-9]{400,}")


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        title: what it is, for messages.
        recognises: whether a file with this path and this beginning is one.
        read: the reader; raises PipeplanError.
        given: names of what the user may have to say beside the file.
    """

    title: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path, ImportOptions], Imported]
    given: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    "dapple": Format(
        "a profile of DAPPLE, NAME-pbs-N.txt",
        lambda path, head: looks_like_profile(head) and profile_batch(path) is not None,
        read_profile,
    ),
    "pipedream": Format(
        "a profile of PipeDream, graph.txt",
        lambda path, head: looks_like_profile(head),
        read_profile,
    ),
}
"""Formats by name. A file is of the first one that recognises it."""


@dataclass(frozen=True)
class ClusterFormat:
    """One kind of file that tells of links; as :class:`Format`."""

    title: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path, ImportOptions], ImportedCluster]
    given: tuple[str, ...] = ()


CLUSTER_FORMATS: dict[str, ClusterFormat] = {
    "rocm-smi": ClusterFormat(
        "the tables of `rocm-smi --showtopo`",
        lambda path, head: looks_like_rocm_topology(head),
        read_rocm_cluster,
        GIVEN_PORTS,
    ),
    "nvidia-smi": ClusterFormat(
        "the table of `nvidia-smi topo -m`",
        lambda path, head: looks_like_topology(head),
        read_topology_cluster,
        GIVEN_PORTS,
    ),
    "nccl-topology": ClusterFormat(
        "the XML of NCCL_TOPO_DUMP_FILE",
        lambda path, head: looks_like_nccl_topology(head),
        read_nccl_topology,
        GIVEN_PORTS,
    ),
    "nccl-tests": ClusterFormat(
        "a log of nccl-tests' all_reduce_perf or sendrecv_perf",
        lambda path, head: looks_like_nccl_tests(head),
        read_nccl_cluster,
    ),
    "nccl-all-reduce": ClusterFormat(
        "a log of all_reduce_perf that does not name its test",
        lambda path, head: False,
        lambda path, options: read_nccl_cluster(path, options, "all_reduce"),
    ),
    "nccl-sendrecv": ClusterFormat(
        "a log of sendrecv_perf that does not name its test",
        lambda path, head: False,
        lambda path, options: read_nccl_cluster(path, options, "sendrecv"),
    ),
}
"""Formats of links by name; nccl-all-reduce and nccl-sendrecv are never recognised from a file."""


def format_of(path: str | Path, format_name: str = AUTO) -> str:
    """The name of a file's format: the given one, or the one told from name and contents.

    Raises:
        PipeplanError: if the file cannot be read, or is of no known format.
    """
    path, known = Path(path), (AUTO, *FORMATS, *CLUSTER_FORMATS)
    if format_name not in known:
        raise PipeplanError(
            f"format: {shorten(format_name)} is unknown; use one of {', '.join(known)}"
        )
    head = _head(path)
    return _detect(path, head) if format_name == AUTO else format_name


def import_cluster_file(
    path: str | Path, format_name: str, options: ImportOptions | None = None
) -> ImportedCluster:
    """Read what another tool tells of links.

    Args:
        path: the file.
        format_name: a name in :data:`CLUSTER_FORMATS`, as :func:`format_of` tells.
        options: what the file does not say.

    Raises:
        PipeplanError: naming what cannot be read.
    """
    kind, options = CLUSTER_FORMATS[format_name], options or ImportOptions()
    _require_known(options, format_name, kind.given)
    _require_short_numbers(Path(path))
    return kind.read(Path(path), options)


def _require_known(options: ImportOptions, format_name: str, known: tuple[str, ...]) -> None:
    """Refuse given values that a format has no use for."""
    for name in options.given:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise PipeplanError(f"--given {shorten(name)}: unknown to {format_name}; {takes}")


def import_file(
    path: str | Path, format_name: str = AUTO, options: ImportOptions | None = None
) -> tuple[str, Imported]:
    """Read a file of another tool.

    Args:
        path: the file.
        format_name: a name in :data:`FORMATS`, or ``auto`` to tell it from name and contents.
        options: what the file does not say.

    Returns:
        The name of its format, and what it holds.

    Raises:
        PipeplanError: naming everything that cannot be read.
    """
    name = format_of(path, format_name)
    if name not in FORMATS:
        raise PipeplanError(f"{path}: is {CLUSTER_FORMATS[name].title}, which holds no layers")
    options = options or ImportOptions()
    _require_known(options, name, FORMATS[name].given)
    _require_short_numbers(Path(path))
    return name, FORMATS[name].read(Path(path), options)


def _head(path: Path) -> str:
    """The beginning of a file that can be read whole."""
    try:
        if path.exists() and not path.is_file():
            raise PipeplanError(f"{path}: is no regular file; give the path of a file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise PipeplanError(
                f"{path}: has {size} bytes, more than the {MOST_BYTES} of any layer graph; is it "
                "the right file?"
            )
        with path.open("rb") as file:
            return plain_text(file.read(_HEAD_BYTES))
    except FileNotFoundError:
        raise PipeplanError(f"{path}: no such file") from None
    except OSError as error:
        raise PipeplanError(f"{path}: cannot be read: {error.strerror}") from None


def _require_short_numbers(path: Path) -> None:
    """Refuse numbers that Python does not read, for every format at once."""
    _head(path)  # The file is there and not too large.
    data = path.read_bytes()
    if found := _LONG_NUMBER.search(data):
        line = data.count(b"\n", 0, found.start()) + 1
        raise PipeplanError(
            f"{path}: line {line}: a number of {len(found[0])} digits; the file is damaged, or not "
            "what its other lines say"
        )


def _detect(path: Path, head: str) -> str:
    every: dict[str, Format | ClusterFormat] = {**FORMATS, **CLUSTER_FORMATS}
    if not head.strip():
        raise PipeplanError(f"{path}: is empty; give a file of the kinds {', '.join(every)}")
    for name, kind in every.items():
        if kind.recognises(path, head):
            return name
    titles = "; ".join(f"{name} ({kind.title})" for name, kind in every.items())
    raise PipeplanError(
        f"{path}: is no file that can be imported; those are: {titles}; --from NAME reads it as "
        "one of them and shows what is wrong"
    )
