"""JSON Schemas of the files that Pipeplan reads and writes, generated from the records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from planner.cluster.cluster_file import ClusterFile
from planner.job import Job
from planner.measured.sync_trace import SyncTrace
from planner.model.graph_record import GraphRecord
from planner.model.measured_costs import Costs
from planner.plan.moves import Moves
from planner.plan.plan import Plan
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.sweep_index import SweepIndex
from planner.records.document import Record
from planner.records.field_docs import meanings_of, summary_of, unit_of


@dataclass(frozen=True)
class Artifact:
    """A kind of file.

    Attributes:
        title: name of the kind, for people.
        record: record of its contents.
    """

    title: str
    record: type[Record]

    @property
    def format(self) -> str:
        """The value of its field ``format``."""
        found: str = self.record.model_json_schema()["properties"]["format"]["const"]
        return found


ARTIFACTS = {
    "plan": Artifact("Pipeplan plan", Plan),
    "graph": Artifact("Pipeplan layer graph", GraphRecord),
    "cluster": Artifact("Pipeplan cluster file", ClusterFile),
    "job": Artifact("Pipeplan job file", Job),
    "runtime": Artifact("Pipeplan runtime file", RuntimeRules),
    "costs": Artifact("Pipeplan measured costs of layers", Costs),
    "sweep": Artifact("Pipeplan index of a sweep", SweepIndex),
    "sync-trace": Artifact("Pipeplan trace of synchronisation", SyncTrace),
    "moves": Artifact("Pipeplan moves between plans", Moves),
}
"""Kinds of files by the names of their schemas. A measured timeline is a Chrome trace and has none.
"""


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_KEY = {
    "type": "string",
    "description": "The schema of this file, for editors; nothing else reads it.",
}


class _Generator(GenerateJsonSchema):
    """Takes descriptions from docstrings and omits titles, which would repeat field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        found = super().model_schema(schema)
        record = schema["cls"]
        if issubclass(record, Record):
            found["description"] = summary_of(record)
            meanings = meanings_of(record)
            for name, field in found["properties"].items():
                _describe(field, meanings.get(name, ""), unit_of(name))
        return found


def _describe(field: dict[str, Any], meaning: str, unit: str) -> None:
    text = meaning[:1].upper() + meaning[1:]
    if unit:
        text = f"{text.rstrip('.')}. Unit: {unit}.".lstrip(". ")
    if text:
        field["description"] = text


def json_schema(artifact: Artifact) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a kind of file.

    It contains the fields, their types and their ranges. Conditions on several fields (names that
    have to exist, sums, orders) are checked by the readers, and for a plan by ``pipeplan verify``.

    Args:
        artifact: the kind of file.
    """
    schema = artifact.record.model_json_schema(schema_generator=_Generator)
    properties = {"$schema": _SCHEMA_KEY, **schema.pop("properties")}
    return {
        "$schema": DIALECT,
        "$id": f"urn:{artifact.format.replace('/', ':')}",
        **schema,
        "title": artifact.title,
        "properties": properties,
        # It may be left out inside other files; a separate file has to name its format.
        "required": ["format", *(name for name in schema.get("required", ()) if name != "format")],
    }


def schema_text(artifact: Artifact) -> str:
    """Return the schema as the text of a JSON file."""
    return json.dumps(json_schema(artifact), indent=1, ensure_ascii=False) + "\n"
