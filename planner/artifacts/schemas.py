"""JSON Schemas of the files that Pipeplan reads and writes, made from the records themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from planner.artifacts.cluster_file import ClusterFile
from planner.artifacts.costs import Costs
from planner.artifacts.document import Record
from planner.artifacts.field_docs import meanings_of, summary_of, unit_of
from planner.artifacts.graph_record import GraphRecord
from planner.artifacts.job import Job
from planner.artifacts.moves import Moves
from planner.artifacts.plan import Plan
from planner.artifacts.sweep import SweepIndex
from planner.artifacts.sync_trace import SyncTrace


@dataclass(frozen=True)
class Artifact:
    """A kind of file.

    Attributes:
        title: what people call it.
        record: what it holds.
    """

    title: str
    record: type[Record]

    @property
    def format(self) -> str:
        """What its field ``format`` says."""
        found: str = self.record.model_json_schema()["properties"]["format"]["const"]
        return found


ARTIFACTS = {
    "plan": Artifact("Pipeplan plan", Plan),
    "graph": Artifact("Pipeplan layer graph", GraphRecord),
    "cluster": Artifact("Pipeplan cluster file", ClusterFile),
    "job": Artifact("Pipeplan job file", Job),
    "costs": Artifact("Pipeplan measured costs of layers", Costs),
    "sweep": Artifact("Pipeplan index of a sweep", SweepIndex),
    "sync-trace": Artifact("Pipeplan trace of synchronisation", SyncTrace),
    "moves": Artifact("Pipeplan moves between plans", Moves),
}
"""By the names of their schemas. A measured timeline is a Chrome trace and has none."""


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_KEY = {
    "type": "string",
    "description": "The schema of this file, for editors; nothing else reads it.",
}


class _Generator(GenerateJsonSchema):
    """Descriptions come from docstrings; titles of fields would only repeat their names."""

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
    """The JSON Schema (draft 2020-12) of a kind of file.

    It says which fields there are, their types and their ranges. What holds between fields
    (names that have to exist, sums, orders) the readers check, and ``pipeplan verify`` of a plan.

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
        # Inside other files it may be left out; a file of its own has to say what it is.
        "required": ["format", *(name for name in schema.get("required", ()) if name != "format")],
    }


def schema_text(artifact: Artifact) -> str:
    """The schema as the text of a JSON file."""
    return json.dumps(json_schema(artifact), indent=1, ensure_ascii=False) + "\n"
