"""Base class and functions of all files: reading, checking, digests and atomic writing."""

import hashlib
import json
import os
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import SchemaValidator

from planner.errors import MOST_PROBLEMS, PipeplanError, shorten

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of bytes, FLOPs or elements that fits 64-bit integers."""


MOST_JSON_BYTES = 2**28
MOST_TOML_BYTES = 2**21
"""The largest files that are read; TOML, which people write, takes long to read."""
MOST_ENTRIES = 100_000
"""Most layers, devices or links of a file, and most entries of one JSON object."""
MOST_OBJECTS = 500_000
"""Most objects of a JSON file, each of which takes up to a kilobyte while it is checked."""
MOST_MEASURED_OBJECTS = 2**24
"""Likewise of files with an object for each measured event."""
_MOST_WITH_ALL_PROBLEMS = 2**16
"""Characters of JSON up to which every wrong entry of a list is named, beyond that the first."""
_CONSTANT = re.compile("NaN|Infinity")


class Record(BaseModel):
    """Base of all artifact records: immutable, strict, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    NAMES_ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """Names that other tools have for fields, and what to write instead."""

    def __repr__(self) -> str:
        """Return the class and its fields, long ones cut."""
        fields = (f"{name}={shorten(getattr(self, name))}" for name in type(self).model_fields)
        return f"{type(self).__name__}({', '.join(fields)})"

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Check ``data`` (plain JSON values) against this record.

        Args:
            data: content of a JSON or TOML file.
            source: its name in messages, usually the file's.

        Raises:
            PipeplanError: with one line for every wrong field.
        """
        try:
            text = json.dumps(data)
            if len(text) > _MOST_WITH_ALL_PROBLEMS:
                return cast("Self", cls._validator_to_first_problems().validate_json(text))
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise PipeplanError(problem_lines(error, source, data)) from None
        except TypeError as error:
            found = next(_not_plain(data, ()), str(error))
            raise PipeplanError(f"{source}: {found}") from None
        except ValueError as error:
            raise PipeplanError(f"{source}: {error}") from None
        except RecursionError:
            raise PipeplanError(f"{source}: nested too deeply") from None

    @classmethod
    @cache
    def _validator_to_first_problems(cls) -> SchemaValidator:
        """Return a validator that looks in each list only as far as the first wrong entry.

        A million wrong entries would otherwise be a million errors of half a kilobyte each.
        """
        # With the validators of nested records that there are already, theirs would not end.
        return SchemaValidator(_failing_fast(cls.__pydantic_core_schema__), _use_prebuilt=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed and without cached values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied


def _failing_fast(schema: Any) -> Any:
    """Return a core schema of pydantic whose lists end at their first wrong entry."""
    if isinstance(schema, list):
        return [_failing_fast(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    copied = {key: _failing_fast(part) for key, part in schema.items()}
    if schema.get("type") in ("list", "tuple", "set", "frozenset"):
        copied["fail_fast"] = True
    return copied


def problem_lines(error: ValidationError, source: str, data: Any) -> Iterator[str]:
    """Yield a line for each problem; those that will only be counted are empty."""
    found = error.errors(include_url=False)
    # A list that ended at a wrong first entry seems to have none.
    within = {item["loc"][:k] for item in found for k in range(len(item["loc"]))}
    items = [item for item in found if item["type"] != "too_short" or item["loc"] not in within]
    for item in items[: MOST_PROBLEMS + 1]:
        yield f"{source}: {_field(item['loc'])}{_explain(item)}{_owner(item['loc'], data)}"
    yield from repeat("", len(items) - MOST_PROBLEMS - 1)


def _field(location: tuple[int | str, ...]) -> str:
    """Return the field's position; validators of several fields name them in the message."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{text.lstrip('.')}: " if text else ""


def _owner(location: tuple[int | str, ...], data: Any) -> str:
    """Return the list entry that a field belongs to, by its name or its two ends."""
    owner = ""
    for part in location[:-1]:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return owner
        if isinstance(part, int) and isinstance(data, Mapping):
            name, ends = data.get("name"), data.get("between")
            if isinstance(name, str):
                owner = f", in the entry {shorten(name)}"
            elif isinstance(ends, list) and len(ends) == 2:
                owner = f", in the link between {shorten(ends[0])} and {shorten(ends[1])}"
    return owner


def _explain(item: Any) -> str:
    found = item.get("input")
    shown = shorten(found) if isinstance(found, str | int | float | bool | type(None)) else None
    match item["type"]:
        case "json_invalid":
            # The input is the whole file here, and the place one in our own copy of it.
            reason = item["ctx"]["error"].partition(" at line ")[0]
            return f"not what a JSON file of Pipeplan can hold: {reason}"
        case "extra_forbidden":
            return f"unknown field (value {_json(found)}); {_suggestion(str(item['loc'][-1]))}"
        case "missing":
            return "this field is missing; add it"
        case "value_error":
            return str(item["ctx"]["error"]) + (f" (found {shown})" if shown else "")
    return _expected(item) + (f" (found {shown})" if shown else "")


def _expected(item: Any) -> str:
    """Describe the values that a field takes, from pydantic's own message."""
    context = item.get("ctx", {})
    match item["type"]:
        case "greater_than_equal" if 0 < context["ge"] < 1e-6:
            return "expected a number above 0"
        case "greater_than_equal":
            return f"expected at least {context['ge']}"
        case "greater_than":
            return f"expected more than {context['gt']}"
        case "less_than_equal":
            return f"expected at most {context['le']}"
        case "bool_type":
            return "expected true or false"
        case "int_type" | "float_type" if isinstance(item["input"], str):
            return "expected a number without quotes"
        case "too_short":
            return f"expected {context['min_length']} or more of them, found {_count(context)}"
        case "too_long":
            return f"expected {context['max_length']} of them at most, found {_count(context)}"
    text: str = item["msg"]
    return f"expected {text.removeprefix('Input should be ')}" if "should be" in text else text


def _count(context: Any) -> str:
    return str(context["actual_length"] or "none")


def _suggestion(name: str) -> str:
    records: list[type[BaseModel]] = [Record]
    fields: set[str] = set()
    while records:
        record = records.pop()
        records += record.__subclasses__()
        elsewhere: Mapping[str, str] = getattr(record, "NAMES_ELSEWHERE", {})
        if name in elsewhere:
            return elsewhere[name]
        fields.update(record.model_fields)
    others = sorted(fields - {name})
    # Names end in units, which are easily left out.
    close = get_close_matches(name, others, 1, 0.85)
    close = close or get_close_matches(name, [*others, *(x[: len(name)] for x in others)], 1)
    meant = [x for x in others if x in close] or [x for x in others if x[: len(name)] in close]
    words = " or ".join(map(repr, meant[:3]))
    return f"did you mean {words}?" if words else "remove it or correct its name"


def left_out(default: Any) -> Any:
    """Return the default of a newer field: data leave the field out where it has its default.

    So the digests of files of earlier versions stay the same.
    """
    given = {"default_factory": dict} if default == {} else {"default": default}
    return Field(exclude_if=lambda value: value == default, **given)


def _json(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def read_json(
    path: str | Path, *, keeps_nan: bool = False, most_objects: int = MOST_OBJECTS
) -> Any:
    """Read a JSON file; a cut file, a duplicate key or a NaN is an error with its position.

    Args:
        path: path of the file.
        keeps_nan: keep NaN and Infinity, for a reader that names their field itself.
        most_objects: that the file may hold; one of more is not read.
    """
    path = Path(path)
    text = read_text(path, MOST_JSON_BYTES, most_objects)
    if path.suffix.lower() == ".toml":
        raise PipeplanError(f"{path}: a TOML file where a JSON file is expected, such as a plan")
    if not text.strip():
        raise PipeplanError(f"{path}: line 1, column 1: not valid JSON: the file is empty")
    constant = float if keeps_nan else _NoNumber
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=constant)
        for field, name in _no_numbers(data, ()) if _CONSTANT.search(text) else ():
            raise ValueError(f"{field}{name} is not a number a plan can hold; give a finite one")
        return data
    except json.JSONDecodeError as error:
        raise PipeplanError(
            f"{path}: line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}); "
            "the file may be cut off or hand-edited wrongly"
        ) from None
    except RecursionError:
        raise PipeplanError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise PipeplanError(f"{path}: {error}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; errors name the line."""
    path = Path(path)
    text = read_text(path, MOST_TOML_BYTES)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PipeplanError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise PipeplanError(f"{path}: TOML nested too deeply") from None
    except ValueError as error:  # Such as an integer of thousands of digits.
        raise PipeplanError(f"{path}: {error}") from None


def read_toml_or_json(path: str | Path) -> Any:
    """Read a file that people write as TOML and programs as JSON, by the end of its name."""
    return read_json(path) if str(path).endswith(".json") else read_toml(path)


def read_text(
    path: Path, most_bytes: int = MOST_JSON_BYTES, most_objects: int | None = None
) -> str:
    """Read a text file.

    Args:
        path: of the file.
        most_bytes: that it may have.
        most_objects: of JSON that it may hold, counted by their first characters.

    Raises:
        PipeplanError: if there is no file, or it is not text or too large.
    """
    try:
        if (size := path.stat().st_size) > most_bytes:
            raise PipeplanError(
                f"{path}: {size:,} bytes; at most {most_bytes:,} are read: name another file, or "
                "split what it holds"
            )
        if most_objects is not None and path.is_file() and _braces(path) > most_objects:
            raise PipeplanError(
                f"{path}: more than {most_objects:,} objects; name another file, or split what it "
                "holds"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PipeplanError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise PipeplanError(f"{path}: cannot be read: it is a folder; name a file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PipeplanError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def _braces(path: Path) -> int:
    """Return how often an object may begin, without holding the file."""
    with path.open("rb") as file:
        return sum(chunk.count(b"{") for chunk in iter(lambda: file.read(2**20), b""))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(pairs) > MOST_ENTRIES:
        raise ValueError(
            f"an object has {len(pairs):,} entries, the first {shorten(pairs[0][0])}; at most "
            f"{MOST_ENTRIES:,} are read"
        )
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"key {shorten(twice)} appears twice in one object; keep one")
    return result


class _NoNumber(str):
    """A placeholder for NaN or an infinity until its field is known."""


def _no_numbers(data: Any, place: tuple[int | str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the fields that contain NaN or an infinity."""
    if isinstance(data, _NoNumber):
        yield _field(place), str(data)
        return
    rows = data.items() if isinstance(data, dict) else enumerate(data)
    for part, value in rows:
        if isinstance(value, dict | list | _NoNumber):
            yield from _no_numbers(value, (*place, part))


def _not_plain(data: Any, place: tuple[int | str, ...]) -> Iterator[str]:
    """Yield what JSON does not have, which no file can hold but a caller's data can."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _not_plain(value, (*place, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _not_plain(value, (*place, index))
    elif not isinstance(data, str | int | float | bool | None):
        yield (
            f"{_field(place)}expected text, a number, true, false, null, a list or an object with "
            f"names, found {shorten(data)} of type {type(data).__name__}; convert it, as float() "
            "and str() do"
        )


def canonical_json(data: Any) -> str:
    """Return one text for equal values: sorted keys, no spaces."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(record: Record) -> str:
    """Return the SHA-256 of a record's canonical JSON, as ``sha256:…``."""
    return digest_of_data(record.model_dump(mode="json"))


def digest_of_data(data: Any) -> str:
    """Return the SHA-256 of the canonical JSON of plain data, as ``sha256:…``."""
    return "sha256:" + hashlib.sha256(canonical_json(data).encode()).hexdigest()


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all: to a temporary file in its folder, then rename.

    A symbolic link stays; its target is replaced.

    Raises:
        PipeplanError: if the folder does not exist or cannot be written, or the path is not a
            regular file, such as a folder or a device.
    """
    require_file_path(path)
    path = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    except OSError as error:
        raise PipeplanError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~umask())
        os.replace(temporary, path)
    except OSError as error:
        raise PipeplanError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def require_file_path(path: str | Path) -> None:
    """Refuse a path that cannot be written, before work is lost.

    Raises:
        PipeplanError: with the reason.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise PipeplanError(
            f"{path}: cannot be written: there is no folder {target.parent}; create it"
        )
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "no regular file"
        raise PipeplanError(f"{path}: cannot be written: it is {kind}; give the path of a file")
    if not os.access(target.parent, os.W_OK):
        raise PipeplanError(f"{path}: cannot be written: no permission in folder {target.parent}")


def umask() -> int:
    """Return the permissions that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
