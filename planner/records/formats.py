"""The field ``format`` of every file: its kind and the number of its format.

A format's number rises when older versions of Pipeplan would misread a new file, or this version an
old one; docs/compatibility.md says when. One number of each kind is read, the present one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from planner.errors import PipeplanError, shorten
from planner.records.document import (
    MOST_OBJECTS,
    Record,
    read_json,
    read_toml_or_json,
    write_atomically,
)

KINDS = {
    "pipeplan/8": "a plan",
    "pipeplan-graph/2": "a layer graph",
    "pipeplan-cluster/1": "a cluster file",
    "pipeplan-job/1": "a job file",
    "pipeplan-runtime/1": "a runtime file",
    "pipeplan-train/1": "a training file",
    "pipeplan-checkpoint/2": "a checkpoint's manifest",
    "pipeplan-timeline/2": "a measured timeline",
    "pipeplan-costs/1": "a costs file, as `pipeplan profile` writes it",
    "pipeplan-sync-trace/2": "a trace of synchronisation",
    "pipeplan-sweep/7": "the index of a sweep",
    "pipeplan-moves/1": "what a new plan moves",
}
"""Kinds of files by their present ``format``."""
MADE_BY = {
    "pipeplan-timeline/2": "torchrun -m executor PLAN --timeline FILE",
    "pipeplan-checkpoint/2": "torchrun -m executor PLAN --config FILE",
    "pipeplan/8": "pipeplan plan",
    "pipeplan-graph/2": "pipeplan trace -o FILE",
    "pipeplan-sync-trace/2": "torchrun -m executor PLAN --sync-trace FILE",
    "pipeplan-sweep/7": "pipeplan sweep -o FOLDER",
}
"""Commands that write the kinds of files that had earlier numbers during development."""
WRITTEN_ONLY = {"pipeplan-stages/1": "the stages of an export"}
"""Files for people's own scripts: Pipeplan writes them and never reads them."""


def read_formatted(path: str | Path, expected: str) -> Mapping[str, Any]:
    """Read a TOML or JSON file in the ``expected`` format; see :func:`check_format`."""
    return check_format(read_toml_or_json(path), expected, str(path))


def check_format(data: Any, expected: str, source: str) -> Mapping[str, Any]:
    """Return ``data`` as a mapping in the ``expected`` format.

    A key ``$schema``, which editors read, is left out.

    Raises:
        PipeplanError: for another kind of file, another version, or no object at all.
    """
    if not isinstance(data, Mapping):
        what = "a list" if isinstance(data, list) else "null" if data is None else shorten(data)
        raise PipeplanError(f"{source}: expected an object with a field 'format', found {what}")
    found = data.get("format")
    if found == expected:
        return _without_schema(data, source)
    if "format" not in data:
        raise PipeplanError(
            f"{source}: format: expected {expected!r}, but the field is missing; is this "
            f"{KINDS[expected]}?"
        )
    raise PipeplanError(f"{source}: format: {_why_unread(found, expected)}")


def _why_unread(found: object, expected: str) -> str:
    """Return why a file whose format is not the ``expected`` one is not read, and the remedy."""
    kind, _, version = expected.rpartition("/")
    other_kind, _, other = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    if other_kind != kind:
        return (
            f"expected {expected!r}, found {shorten(found)}; this is {kind_of(found)}, give "
            f"{KINDS[expected]}"
        )
    number = int(other) if re.fullmatch("[0-9]{1,9}", other) else None
    if number is not None and number > int(version):
        return (
            f"{shorten(found)} is newer than {expected!r}, which this version of Pipeplan reads; "
            "upgrade Pipeplan"
        )
    if number is not None and number < int(version) and expected in MADE_BY:
        return (
            f"{shorten(found)} is of an earlier development version, which this version does not "
            f"read; make the file anew with `{MADE_BY[expected]}`"
        )
    return f"expected {expected!r}, found {shorten(found)}; correct the number"


def _without_schema(data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if not isinstance(data.get("$schema", ""), str):
        raise PipeplanError(
            f"{source}: $schema: expected the address of a JSON Schema as text, found "
            f"{shorten(data['$schema'])}; correct it or leave it out"
        )
    return {name: value for name, value in data.items() if name != "$schema"}


def kind_of(found: object) -> str:
    """Return the kind of a file by its format, whatever the version."""
    kind = found.rpartition("/")[0] if isinstance(found, str) else ""
    names = {known.rpartition("/")[0]: name for known, name in {**KINDS, **WRITTEN_ONLY}.items()}
    return names.get(kind, "something else")


class JsonFile(Record):
    """Base of records that are separate JSON files, with a field ``format``.

    Fields are checked, contents are not: ``planner.verify`` checks a plan, and
    :func:`planner.verification.save_valid` does so before it writes one.
    """

    MOST_OBJECTS: ClassVar[int] = MOST_OBJECTS

    @classmethod
    def parse(cls, data: Any, source: str = "") -> Self:
        """Check the form of plain JSON data.

        Args:
            data: plain JSON values.
            source: the name to use for it in messages; by default the kind of file.

        Raises:
            PipeplanError: naming every wrong field, or a format that this version does not read.
        """
        newest = cls.model_fields["format"].default
        source = source or KINDS[newest].partition(" ")[2]
        return super().parse(check_format(data, newest, source), source)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            PipeplanError: as :meth:`parse`, or if the file cannot be read.
        """
        return cls.parse(read_json(path, most_objects=cls.MOST_OBJECTS), str(path))

    def save(self, path: str | Path) -> None:
        """Write the file as JSON, atomically."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")
