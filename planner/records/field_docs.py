"""Meanings and units of a record's fields, from its docstring and the fields' names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from planner.records.document import Record

_UNITS = {
    "_gb_per_s": "10^9 bytes/s",
    "_tflop_per_s": "10^12 FLOP/s",
    "_per_hour": "currency/h",
    "_bytes": "bytes",
    "_gib": "GiB (2^30 bytes)",
    "_flops": "FLOPs",
    "_us": "µs",
    "_s": "s",
}
_ROLE = re.compile(r":\w+:`~?\.?([^`]+)`")
_ENTRY = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


def unit_of(field: str) -> str:
    """Return the unit of a field by the end of its name, or an empty string."""
    if field == "bytes":
        return "bytes"
    return next((unit for end, unit in _UNITS.items() if field.endswith(end)), "")


def summary_of(record: type[Record]) -> str:
    """Return a record's docstring up to the list of attributes, as plain Markdown."""
    return _plain(_sections(record)[0])


def meanings_of(record: type[Record]) -> dict[str, str]:
    """Return the meaning of each field by name; undocumented fields are left out."""
    meanings: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if issubclass(base, Record) and "__doc__" in vars(base):
            meanings |= _entries(_sections(base)[1])
    return {name: meanings[name] for name in record.model_fields if name in meanings}


def _sections(record: type[Record]) -> tuple[str, str]:
    text, _, attributes = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    return text.strip(), inspect.cleandoc(attributes)


def _entries(text: str) -> dict[str, str]:
    """Parse ``name: words`` and ``name, name: words`` with indented continuations."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: _plain(words) for name, words in found.items()}


def _plain(text: str) -> str:
    """Convert docstring markup to Markdown and join the lines of each paragraph."""
    text = _ROLE.sub(r"`\1`", text).replace("``", "`")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def known_or_own_schema(known: Sequence[str]) -> dict[str, Any]:
    """Return the JSON Schema of a field that takes these words or ``module:name``."""
    own = {"pattern": "^[^:]+:[^:]+$"}
    return {"anyOf": [{"enum": list(known)}, own]} if known else own
