"""torchtitan's arguments on a command line, as the tables of a configuration.

torchtitan 0.3.0 reads no file: a function makes the configuration, and ``--section.field value``
overrides it; ``activation-checkpoint:full`` names a policy (``torchtitan/config/manager.py``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.script import Script

_FIELD = re.compile(
    r"--(parallelism|training|compile|activation[-_]checkpoint)\.([\w-]+)(?:=(.*))?"
)
_POLICY = re.compile(r"activation[-_]checkpoint:([\w-]+)")


def tables_of_words(text: str, source: str) -> dict[str, Any]:
    """Return the tables that a launch script, or its arguments alone, set; nothing is run.

    Raises:
        PipeplanError: if quotes do not match, a value depends on more than the file, or there is no
            argument of these tables.
    """
    try:
        words = Script.of(text).words
    except ValueError as error:
        raise PipeplanError(
            f"{source}: {error}; give torchtitan's arguments alone, or TOML or JSON"
        ) from None
    tables: dict[str, Any] = {}
    for place, word in enumerate(words):
        if found := _POLICY.fullmatch(word.text):
            tables["activation_checkpoint"] = {"mode": found[1]}
        if not (found := _FIELD.fullmatch(word.text)):
            continue
        section, field, value = found.groups()
        following = words[place + 1] if place + 1 < len(words) else None
        is_literal = word.is_literal
        if value is None and following and not following.text.startswith("--"):
            value, is_literal = following.text, is_literal and following.is_literal
        if not is_literal:
            raise PipeplanError(
                f"{source}: --{section}.{field}: {shorten(value or '')}: the script computes it; "
                "paste the arguments with their values"
            )
        key, is_on = field.replace("-", "_"), value is None
        if is_on and key.startswith("no_"):
            key, is_on = key.removeprefix("no_"), False
        table = tables.setdefault(section.replace("-", "_"), {})
        table[key] = is_on if value is None else _value(value)
    if not tables:
        raise PipeplanError(
            f"{source}: has no argument of torchtitan that lays out a model, such as "
            "--parallelism.pipeline_parallel_degree; paste the arguments of the run"
        )
    return {"parallelism": {}, **tables}


def _value(text: str) -> Any:
    """Return a value as JSON has it, or as it stands."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return None if text == "None" else text
