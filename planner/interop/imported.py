"""Files of other tools as clusters: the formats by name, and the detection of a file's format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.interop.machines import (
    GIVEN_PORTS,
    Capture,
    ImportedCluster,
    ImportOptions,
    plain_text,
)
from planner.interop.nccl_tests import is_nccl_tests, read_nccl_tests
from planner.interop.nccl_topology import is_nccl_topology, read_nccl_topology
from planner.interop.nvidia_smi import is_nvidia_smi, read_nvidia_smi
from planner.interop.rocm_smi import is_rocm_smi, read_rocm_smi

AUTO = "auto"
MOST_BYTES = 2**28
_HEAD_BYTES = 2**16
_LONG_NUMBER = re.compile(rb"[0-9]{400,}")


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        title: what it is, for messages.
        read: the reader; raises PipeplanError.
        recognises: whether a file with this beginning is one; None: it is never recognised.
        given: names of what the user may have to say beside the file.
    """

    title: str
    read: Callable[[Capture, ImportOptions], ImportedCluster]
    recognises: Callable[[str], bool] | None = None
    given: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    "rocm-smi": Format(
        "the tables of `rocm-smi --showtopo`", read_rocm_smi, is_rocm_smi, GIVEN_PORTS
    ),
    "nvidia-smi": Format(
        "the table of `nvidia-smi topo -m`", read_nvidia_smi, is_nvidia_smi, GIVEN_PORTS
    ),
    "nccl-topology": Format(
        "the XML of NCCL_TOPO_DUMP_FILE", read_nccl_topology, is_nccl_topology, GIVEN_PORTS
    ),
    "nccl-tests": Format(
        "a log of nccl-tests' all_reduce_perf or sendrecv_perf", read_nccl_tests, is_nccl_tests
    ),
    "nccl-all-reduce": Format(
        "a log of all_reduce_perf that does not name its test",
        lambda found, options: read_nccl_tests(found, options, "all_reduce"),
    ),
    "nccl-sendrecv": Format(
        "a log of sendrecv_perf that does not name its test",
        lambda found, options: read_nccl_tests(found, options, "sendrecv"),
    ),
}
"""Formats by name. A file is of the first one that recognises it."""


def import_cluster(
    path: str | Path, format_name: str = AUTO, options: ImportOptions | None = None
) -> tuple[str, ImportedCluster]:
    """Read what another tool tells of the links of a machine.

    Args:
        path: the file.
        format_name: a name in :data:`FORMATS`, or ``auto`` to tell it from the contents.
        options: what the file does not say.

    Returns:
        The name of its format, and what it holds.

    Raises:
        PipeplanError: naming what cannot be read.
    """
    path, options, known = Path(path), options or ImportOptions(), (AUTO, *FORMATS)
    if format_name not in known:
        raise PipeplanError(
            f"format: {shorten(format_name)} is unknown; use one of {', '.join(known)}"
        )
    data = _contents(path)
    name = _detected(path, data) if format_name == AUTO else format_name
    kind = FORMATS[name]
    for given in options.given:
        if given not in kind.given:
            takes = f"it takes {', '.join(kind.given)}" if kind.given else "it takes none"
            raise PipeplanError(f"--given {shorten(given)}: unknown to {name}; {takes}")
    if found := _LONG_NUMBER.search(data):  # Python refuses to convert these.
        line = data.count(b"\n", 0, found.start()) + 1
        raise PipeplanError(
            f"{path}: line {line}: a number of {len(found[0])} digits; the file is damaged, or not "
            "what its other lines say"
        )
    return name, kind.read(Capture.read(path, data), options)


def _contents(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise PipeplanError(f"{path}: is no regular file; give the path of a file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise PipeplanError(
                f"{path}: has {size} bytes, more than the {MOST_BYTES} of any such file; is it "
                "the right file?"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise PipeplanError(f"{path}: no such file") from None
    except OSError as error:
        raise PipeplanError(f"{path}: cannot be read: {error.strerror}") from None


def _detected(path: Path, data: bytes) -> str:
    head = plain_text(data[:_HEAD_BYTES])
    if not head.strip():
        raise PipeplanError(f"{path}: is empty; give a file of the kinds {', '.join(FORMATS)}")
    for name, kind in FORMATS.items():
        if kind.recognises is not None and kind.recognises(head):
            return name
    titles = "; ".join(f"{name} ({kind.title})" for name, kind in FORMATS.items())
    raise PipeplanError(
        f"{path}: is no file that can be imported; those are: {titles}; --from NAME reads it as "
        "one of them and shows what is wrong"
    )
