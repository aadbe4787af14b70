"""The formats that can be read, by name, and how a file's format is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError, shorten
from planner.importing.dnn_partitioning import looks_like_dnn_partitioning
from planner.importing.dnn_partitioning_graph import read_dnn_partitioning
from planner.importing.imported import Imported
from planner.importing.options import ImportOptions
from planner.importing.profiles import looks_like_profile, profile_batch, read_profile

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
    path = Path(path)
    if format_name not in (AUTO, *FORMATS):
        raise PipeplanError(
            f"format: {shorten(format_name)} is unknown; use one of {', '.join((AUTO, *FORMATS))}"
        )
    head = _head(path)
    name = _detect(path, head) if format_name == AUTO else format_name
    return name, FORMATS[name].read(path, options or ImportOptions())


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
    if not head.strip():
        raise PipeplanError(f"{path}: is empty; give a file of the kinds {', '.join(FORMATS)}")
    for name, kind in FORMATS.items():
        if kind.recognises(path, head):
            return name
    titles = "; ".join(f"{name} ({kind.title})" for name, kind in FORMATS.items())
    raise PipeplanError(
        f"{path}: is no file that can be imported; those are: {titles}; --from NAME reads it as "
        "one of them and tells what is wrong"
    )
