"""The formats that can be read, by name, and how a file's format is told.

Profiles become layer graphs, what other tools tell of links becomes clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.importing.dnn_partitioning import looks_like_dnn_partitioning
from planner.importing.dnn_partitioning_graph import read_dnn_partitioning
from planner.importing.imported import Imported
from planner.importing.imported_cluster import ImportedCluster
from planner.importing.nccl_cluster import read_nccl_cluster
from planner.importing.nccl_tests import looks_like_nccl_tests
from planner.importing.nvidia_topology import looks_like_topology
from planner.importing.options import ImportOptions
from planner.importing.profiles import looks_like_profile, profile_batch, read_profile
from planner.importing.topology_cluster import read_topology_cluster

AUTO = "auto"
MOST_BYTES = 2**28
_HEAD_BYTES = 2**16


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        title: what it is, for messages.
        recognises: whether a file with this path and this beginning is one.
        read: the reader; raises PipeplanError.
    """

    title: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path, ImportOptions], Imported]


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
    "dnn-partitioning": Format(
        "a placement instance of dnn-partitioning, JSON",
        lambda path, head: looks_like_dnn_partitioning(head),
        lambda path, options: read_dnn_partitioning(path),
    ),
}
"""By name. A file is of the first format that recognises it."""


@dataclass(frozen=True)
class ClusterFormat:
    """One kind of file that tells of links; as :class:`Format`.

    ``read`` takes the path and the device preset of the user, or None.
    """

    title: str
    recognises: Callable[[Path, str], bool]
    read: Callable[[Path, str | None], ImportedCluster]


CLUSTER_FORMATS: dict[str, ClusterFormat] = {
    "nvidia-smi": ClusterFormat(
        "the table of `nvidia-smi topo -m`",
        lambda path, head: looks_like_topology(head),
        read_topology_cluster,
    ),
    "nccl-tests": ClusterFormat(
        "a log of nccl-tests' all_reduce_perf or sendrecv_perf",
        lambda path, head: looks_like_nccl_tests(head),
        read_nccl_cluster,
    ),
    "nccl-all-reduce": ClusterFormat(
        "a log of all_reduce_perf that does not name its test",
        lambda path, head: False,
        lambda path, device_type: read_nccl_cluster(path, device_type, "all_reduce"),
    ),
    "nccl-sendrecv": ClusterFormat(
        "a log of sendrecv_perf that does not name its test",
        lambda path, head: False,
        lambda path, device_type: read_nccl_cluster(path, device_type, "sendrecv"),
    ),
}
"""By name, as :data:`FORMATS`; the last two are never told from a file."""


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
    path: str | Path, format_name: str, device_type: str | None = None
) -> ImportedCluster:
    """Read what another tool tells of links.

    Args:
        path: the file.
        format_name: a name in :data:`CLUSTER_FORMATS`, as :func:`format_of` tells.
        device_type: preset of the GPUs, where the file does not name them.

    Raises:
        PipeplanError: naming what cannot be read.
    """
    return CLUSTER_FORMATS[format_name].read(Path(path), device_type)


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
    return name, FORMATS[name].read(Path(path), options or ImportOptions())


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
            return file.read(_HEAD_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise PipeplanError(f"{path}: no such file") from None
    except OSError as error:
        raise PipeplanError(f"{path}: cannot be read: {error.strerror}") from None


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
        "one of them and tells what is wrong"
    )
