"""What a file says it is in its field ``format``: its kind, and the number of its format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.artifacts.migrations import migrate, steps_to
from planner.errors import PipeplanError, shorten

KINDS = {
    "pipeplan/2": "a plan",
    "pipeplan-graph/1": "a layer graph",
    "pipeplan-cluster/1": "a cluster file",
    "pipeplan-job/1": "a job file",
    "pipeplan-train/1": "a training file",
    "pipeplan-checkpoint/1": "a checkpoint's manifest",
    "pipeplan-timeline/1": "a measured timeline",
    "pipeplan-costs/1": "measured costs of layers",
    "pipeplan-sync-trace/1": "a trace of synchronisation",
    "pipeplan-sweep/2": "the index of a sweep",
    "pipeplan-moves/1": "what a new plan moves",
}
"""Files by their field ``format``, of which these are the newest."""
WRITTEN_ONLY = {"pipeplan-stages/1": "the stages of an export"}
"""Files for people's own scripts: Pipeplan writes them and reads none of them."""


def check_format(data: Any, expected: str, source: str) -> Mapping[str, Any]:
    """Return ``data`` as a mapping in the ``expected`` format; older ones are migrated to it.

    A key ``$schema``, which editors read, is left out.

    Raises:
        PipeplanError: for another kind of file, a future version, or no object at all.
    """
    if not isinstance(data, Mapping):
        what = "a list" if isinstance(data, list) else "null" if data is None else shorten(data)
        raise PipeplanError(f"{source}: expected an object with a field 'format', found {what}")
    found = data.get("format")
    if found == expected or steps_to(found, expected):
        return migrate(_without_schema(data, source), expected, source)
    if "format" not in data:
        raise PipeplanError(
            f"{source}: format: expected {expected!r}, but the field is missing; is this "
            f"{KINDS[expected]}?"
        )
    kind, _, version = expected.rpartition("/")
    other_kind, _, other = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    is_number = re.fullmatch("[0-9]{1,9}", other)
    if other_kind == kind and is_number and int(other) > int(version):
        raise PipeplanError(
            f"{source}: format: {shorten(found)} is newer than {expected!r}, which this version of "
            "Pipeplan reads; upgrade Pipeplan"
        )
    raise PipeplanError(
        f"{source}: format: expected {expected!r}, found {shorten(found)}; this is "
        f"{kind_of(found)}, give {KINDS[expected]}"
    )


def _without_schema(data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if not isinstance(data.get("$schema", ""), str):
        raise PipeplanError(
            f"{source}: $schema: expected the address of a JSON Schema as text, found "
            f"{shorten(data['$schema'])}; correct it or leave it out"
        )
    return {name: value for name, value in data.items() if name != "$schema"}


def newest_format(found: object, source: str) -> str:
    """The newest format of a kind of file, by any format of the kind.

    Raises:
        PipeplanError: if it is none of Pipeplan's.
    """
    kind = found.rpartition("/")[0] if isinstance(found, str) else None
    for newest in KINDS:
        if newest.rpartition("/")[0] == kind:
            return newest
    if kind in _kinds(WRITTEN_ONLY):
        raise PipeplanError(
            f"{source}: format: {shorten(found)} is {kind_of(found)}, which Pipeplan writes and "
            "never reads: there is nothing to migrate; write it anew from the plan with "
            "`pipeplan export`"
        )
    raise PipeplanError(
        f"{source}: format: expected one of Pipeplan's, such as {next(iter(KINDS))!r}, found "
        f"{shorten(found)}; name a file that Pipeplan wrote or reads"
    )


def kind_of(found: object) -> str:
    """What a file of a format is, whatever its version."""
    kind = found.rpartition("/")[0] if isinstance(found, str) else None
    return _kinds({**KINDS, **WRITTEN_ONLY}).get(kind or "", "something else")


def _kinds(formats: Mapping[str, str]) -> dict[str, str]:
    """What files are by their kind, the format without its number."""
    return {newest.rpartition("/")[0]: name for newest, name in formats.items()}
