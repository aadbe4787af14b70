"""The fields of torchtitan's configuration, from TOML, JSON or the arguments of a command line.

torchtitan 0.3.0 reads no file: a function makes the configuration, and ``--section.field value``
overrides it; ``activation-checkpoint:full`` names a policy (``torchtitan/config/manager.py``).
Files in TOML are those of 0.2 with the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.interop.adopt.megatron_arguments import MOST_SCRIPT_BYTES
from planner.interop.adopt.script import Script
from planner.records.document import read_text, read_toml_or_json

_FIELD = re.compile(
    r"--(parallelism|training|compile|activation[-_]checkpoint)\.([\w-]+)(?:=(.*))?"
)
_POLICY = re.compile(r"activation[-_]checkpoint:([\w-]+)")
_PARALLELISM = frozenset(
    """context_parallel_degree context_parallel_load_balancer context_parallel_ptrr_mask_key
    context_parallel_rotate_method data_parallel_replicate_degree data_parallel_shard_degree
    disable_loss_parallel enable_async_tensor_parallel enable_fsdp_symm_mem
    enable_sequence_parallel expert_parallel_degree fsdp_reshard_after_forward
    module_fqns_per_model_part pipeline_parallel_degree pipeline_parallel_expert_parallel_overlap
    pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
    pipeline_parallel_layers_per_stage pipeline_parallel_microbatch_size
    pipeline_parallel_schedule pipeline_parallel_schedule_csv spmd_backend
    tensor_parallel_degree""".split()
)
_TRAINING = frozenset(("local_batch_size", "global_batch_size"))
_ABOUT = ("parallel", "batch", "shard", "tokens")
"""Words of fields of other tables that could divide a model."""


@dataclass
class TorchtitanFields:
    """The fields of a file, by their dotted names.

    Attributes:
        source: the file.
        data: its contents.
        problems: what is wrong with them.
    """

    source: str
    data: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> TorchtitanFields:
        """Read a file, and note fields that could divide a model and are none of torchtitan's.

        Args:
            path: of a TOML or JSON file, or of a launch script or arguments alone.

        Raises:
            PipeplanError: if it cannot be read, or has no table ``parallelism``.
        """
        source = str(path)
        is_table = source.endswith((".toml", ".json"))
        data = read_toml_or_json(path) if is_table else _tables_of_words(path, source)
        found = cls(source, data if isinstance(data, Mapping) else {})
        found._refuse_unknown()
        if "parallelism" not in found.data:
            found.problems.append(
                f"{source}: has no table 'parallelism'; give torchtitan's configuration as TOML, "
                "or as JSON"
            )
            raise PipeplanError(found.problems)
        return found

    def value(self, name: str) -> Any:
        """Return the value of a field; None if it is not there."""
        section, _, key = name.partition(".")
        return self.table(section).get(key)

    def table(self, section: str) -> Mapping[str, Any]:
        """Return a table of the file; an empty one if it has none."""
        table = self.data.get(section) or {}
        if isinstance(table, Mapping):
            return table
        self.wrong(section, f"{shorten(table)}: expected a table")
        return {}

    def number(self, name: str, default: int, least: int = 1) -> int:
        """Return the value of a field as a whole number."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
            return value
        self.wrong(name, f"{shorten(value)}: expected a whole number of at least {least}")
        return max(default, 1)

    def wrong(self, name: str, problem: str) -> None:
        """Note a problem of a field."""
        self.problems.append(f"{self.source}: {name}: {problem}")

    def _refuse_unknown(self) -> None:
        known = {"parallelism": _PARALLELISM, "training": _TRAINING}
        for section in ("parallelism", "training", "experimental"):
            for key, value in self.table(section).items():
                is_about = section == "parallelism" or any(part in key for part in _ABOUT)
                is_off = value in (None, False, 0, 1, "")
                if is_about and not is_off and key not in known.get(section, ()):
                    of = [f"{other}.{key}" for other, names in known.items() if key in names]
                    remedy = f"its name is {of[0]}" if of else "leave it out"
                    problem = f"{shorten(value)}: torchtitan 0.3.0 has no such field; {remedy}"
                    self.wrong(f"{section}.{key}", problem)


def _tables_of_words(path: str | Path, source: str) -> dict[str, Any]:
    """Return the tables that a launch script, or its arguments alone, set; nothing is run."""
    try:
        words = Script.of(read_text(Path(path), MOST_SCRIPT_BYTES)).words
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
        section, key, value = found.groups()
        following = words[place + 1] if place + 1 < len(words) else None
        is_literal = word.is_literal
        if value is None and following and not following.text.startswith("--"):
            value, is_literal = following.text, is_literal and following.is_literal
        if not is_literal:
            raise PipeplanError(
                f"{source}: --{section}.{key}: {shorten(value or '')}: the script computes it; "
                "paste the arguments with their values"
            )
        key, is_on = key.replace("-", "_"), value is None
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
