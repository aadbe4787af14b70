"""The page of all files and their fields, generated from the records' JSON Schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from executor.launch.train_schema import TRAIN
from planner.records.field_docs import meanings_of, summary_of, unit_of
from planner.schemas import ARTIFACTS, json_schema
from planner.sync.strategies import OPTIONS, Options

WRITTEN = ("job", "cluster", "train", "graph")
"""Files that people write; they come first."""
KINDS = {
    kind: {**ARTIFACTS, "train": TRAIN}[kind] for kind in dict.fromkeys((*WRITTEN, *ARTIFACTS))
}
HEAD = ("| field | type | unit | default | |", "|---|---|---|---|---|")
ANY = "JsonValue"
"""Pydantic's name for any value of JSON."""
INTRODUCTION = """# Files and their fields

This page is generated from the records that read and write the files. Unknown fields and values of
another type or out of range are refused; the message names the field.
`pipeplan verify --schema KIND` prints the same as a JSON Schema,
see [Schemas](plans.md#schemas-for-editors).

"table" is a TOML table or a JSON object, "list" an array. Fields without a default are required.
One GiB is 2^30 bytes, one GB 10^9 bytes.

A measured timeline (`pipeplan-timeline/2`, from `--timeline`) is a Chrome trace for
Perfetto; commands read its field `timeline`.
"""


def artifact_page() -> str:
    """Return the page as Markdown."""
    parts, seen = [INTRODUCTION], set[str]()
    for kind, artifact in KINDS.items():
        schema = json_schema(artifact)
        name = artifact.record.__name__
        title = artifact.title.removeprefix("Pipeplan ")
        seen.add(name)
        parts += [f"## {title[0].upper()}{title[1:]} {{ #{name.lower()} }}\n"]
        parts += [f"`{artifact.format}`; schema: `pipeplan verify --schema {kind}`.\n"]
        parts += _record(schema)
        for other, definition in _by_use(schema):
            if other not in seen:
                seen.add(other)
                parts += ["", f"### {other} {{ #{other.lower()} }}\n", *_record(definition)]
        parts += [""]
    parts += ["## Options of synchronisation strategies { #synchronisation-options }\n"]
    for name, options in OPTIONS.items():
        parts += [f"### `{name}` {{ #{name} }}\n", *_record(_options_schema(options)), ""]
    return "\n".join(parts) + "\n"


def _options_schema(options: type[Options]) -> dict[str, Any]:
    schema = {**options.model_json_schema(), "description": summary_of(options)}
    for name, field in schema["properties"].items():
        meaning = meanings_of(options)[name]
        field["description"] = meaning[0].upper() + meaning[1:]
    return schema


def _by_use(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the records of a schema in the order of their first use."""
    definitions, met = schema.get("$defs", {}), dict[str, None]()
    waiting = [schema["properties"]]
    while waiting:
        for name in _references(waiting.pop(0)):
            if name not in met:
                met[name] = None
                waiting.append(definitions[name])
    return ((name, definitions[name]) for name in met if name != ANY)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _record(schema: dict[str, Any]) -> list[str]:
    lines = [schema["description"], "", *HEAD]
    for name, field in schema["properties"].items():
        if name != "$schema":
            lines.append(_row(name, field, name in schema.get("required", ())))
    return lines


def _row(name: str, field: dict[str, Any], is_required: bool) -> str:
    unit = unit_of(name)
    meaning = field["description"].removesuffix(f" Unit: {unit}.")
    default = "*required*" if is_required else _default(field)
    cells = (f"`{name}`", type_text(field), unit, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "empty"  # A table, which pydantic makes anew each time.
    value = field["default"]
    return "empty" if value in ([], {}) else f"`{json.dumps(value)}`"


def type_text(field: dict[str, Any]) -> str:
    """Describe a field's type and range."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return "any value" if name == ANY else f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if {"type": "string"} in field.get("anyOf", ()) and len(field["anyOf"]) > 3:
        return "text, number, true or false, null, or a list of these"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(type_text(option) for option in field["anyOf"]))
    kind = field.get("type")
    if kind == "array":
        return _list_text(field)
    if kind == "object":
        values = field.get("additionalProperties", True)
        return "table" if values in (True, {}) else f"table of {type_text(values)}"
    words = {"integer": "integer", "number": "number", "boolean": "true or false", "null": "null"}
    if kind in words:
        return words[kind] + _range(field)
    if kind == "string" or "pattern" in field:
        return "text" + _text_range(field)
    return "any value"


def _list_text(field: dict[str, Any]) -> str:
    if "prefixItems" in field:
        return "list of " + ", ".join(type_text(item) for item in field["prefixItems"])
    least = f", at least {field['minItems']}" if field.get("minItems") else ""
    return f"list of {type_text(field['items'])}{least}"


def _range(field: dict[str, Any]) -> str:
    marks = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{mark} {_number(field[key])}" for key, mark in marks.items() if key in field]
    return " " + ", ".join(limits) if limits else ""


def _number(value: float) -> str:
    if isinstance(value, int) and value >= 2**20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}"


def _text_range(field: dict[str, Any]) -> str:
    if field.get("pattern") == "^[^:]+:[^:]+$":
        return " such as `module:name`"
    return f" matching `{field['pattern']}`" if "pattern" in field else ""
