"""The field ``format`` of every file: its kind and the number of its format.

Migrations of older file formats: one step per format, each a function on plain data.

A format's number rises when older versions of Pipeplan would misread a new file, or this version an
old one; docs/compatibility.md says when. Every number that a released line wrote has a step here
and a file in ``tests/data/formats``. What is inside another file (a plan's layer graph) has no step
of its own: the step of the outer file changes it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

logger = logging.getLogger(__name__)

OLDER_COST_MODEL = 0
"""The cost model's revision in files that do not name the revision behind their figures."""
NOTHING_MIGRATED = "nothing: the file did not say by which revision of the cost model"


@dataclass(frozen=True)
class MigrationStep:
    """The step from one format to the next.

    Attributes:
        to: the next format.
        apply: converts data of the older format. Invalid values stay, for the reader to report.
        changes: what is different afterwards, for people.
    """

    to: str
    apply: Callable[[Mapping[str, Any]], dict[str, Any]]
    changes: str


def _plan_with_cost_model(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the cost model's revision, which ``pipeplan/1`` did not have, and drop the bound.

    Several revisions wrote that format (with different memory, above all), so none of its figures
    is trusted: the bound, which was proved for one of them, becomes 0, and :meth:`Plan.parse`
    predicts the plan again.
    """
    changed = dict(data)
    _update(changed, "predicted", lower_bound_s=0.0, gap=None)
    _update(
        changed,
        "provenance",
        cost_model=OLDER_COST_MODEL,
        problem_digest=None,
        bound_covers=NOTHING_MIGRATED,
    )
    return changed


def _plan_with_time_provenance(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename ``predicted.rests_on`` to ``time_provenance``."""
    changed = dict(data)
    if isinstance(data.get("predicted"), Mapping):
        changed["predicted"] = _renamed(data["predicted"], "rests_on", "time_provenance")
    return changed


_OLDER_SPACE = re.compile(
    r"every plan that cuts the chain of layers, with .*?(?P<own>constraints)?$"
)


def _plan_with_space(data: Mapping[str, Any]) -> dict[str, Any]:
    """Name the freedoms of the bound, which was text, and those of the job.

    Searches tried whole backwards alone then; a plan with split ones came from its schedule.
    Reductions were predicted after the last backwards, whatever the strategy did.
    """
    changed, job = dict(data), data.get("job")
    orders = data.get("orders")
    texts = orders.values() if isinstance(orders, Mapping) else ()
    found = re.findall("[BIW]", " ".join(text for text in texts if isinstance(text, str)))
    splits = not set(found) <= {"B"}
    _update(changed, "job", backward="any" if splits else "whole", overlap_reduction=False)
    _update(changed, "sync", options=_without_overlap(data.get("sync")))
    said = data["provenance"].get("bound_covers") if _is_table(data, "provenance") else None
    if not isinstance(said, str):
        return changed
    older = _OLDER_SPACE.fullmatch(said)
    covers: dict[str, Any]
    if splits:
        covers = {"space": None, "reason": "its bound was proved for whole backwards only"}
        _update(changed, "predicted", lower_bound_s=0.0, gap=None)
    elif older and isinstance(job, Mapping):
        freedoms = {name: job[name] for name in _OLDER_FREEDOMS if name in job}
        covers = {
            "space": {**freedoms, "backward": "whole", "overlap_reduction": False},
            "own_constraints": older["own"] is not None,
        }
    else:
        covers = {"space": None, "reason": said.removeprefix("nothing: ")}
    _update(changed, "provenance", bound_covers=covers)
    return changed


def _with_own_runtime(data: Mapping[str, Any]) -> dict[str, Any]:
    """Name the runtime behind the predictions, which was Pipeplan's own."""
    return {**data, "runtime": {"format": "pipeplan-runtime/1"}}


def _plan_with_runtime(data: Mapping[str, Any]) -> dict[str, Any]:
    """Name the runtime: predictions were those of Pipeplan's own.

    Plans from before reductions could overlap do not speak of it, neither in the job nor in the
    space of the bound; they were predicted, and their bounds proved, without.
    """
    changed = _with_own_runtime(_without_field(data, ("job",)))
    return dict(_without_field(changed, ("provenance", "bound_covers", "space")))


def _with_links_in_turn(data: Mapping[str, Any]) -> dict[str, Any]:
    """Name the rule for links that several messages want, of which there was one."""
    changed = dict(data)
    _update(changed, "runtime", links="in_turn")
    return changed


def _plan_with_newer_graph(data: Mapping[str, Any]) -> dict[str, Any]:
    """Name the newer format of the layer graph, which is the same where it has no splits."""
    changed = dict(data)
    if _is_table(data, "model") and _is_table(data["model"], "graph"):
        graph = {**data["model"]["graph"], "format": "pipeplan-graph/2"}
        _update(changed, "model", graph=graph)
    return changed


def _without_field(data: Mapping[str, Any], way: tuple[str, ...]) -> Mapping[str, Any]:
    """Set the overlap to false in a table, by the way to it, if it is there and lacks it."""
    if not way:
        return {"overlap_reduction": False, **data}
    table = data.get(way[0])
    if not isinstance(table, Mapping):
        return data
    return {**data, way[0]: _without_field(table, way[1:])}


def _without_overlap(sync: Any) -> Any:
    """Return the options of a strategy but that it overlaps, which is its default."""
    options = sync.get("options", {}) if isinstance(sync, Mapping) else {}
    if not isinstance(options, Mapping) or options.get("overlap") is not True:
        return options
    return {name: value for name, value in options.items() if name != "overlap"}


_OLDER_FREEDOMS = ("max_stages", "max_stages_per_device", "replication", "recompute")


def _is_table(data: Mapping[str, Any], key: str) -> bool:
    return isinstance(data.get(key), Mapping)


def _sweep_with_cost_model(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the cost model's revision, which ``pipeplan-sweep/1`` did not have."""
    return {**data, "cost_model": OLDER_COST_MODEL}


def _sync_trace_with_pipeline_ranks(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename ``key`` of every row to ``pipeline_rank``."""
    changed = dict(data)
    if isinstance(data.get("workers"), list):
        changed["workers"] = [
            [_with_pipeline_rank(row) for row in rows] if isinstance(rows, list) else rows
            for rows in data["workers"]
        ]
    return changed


def _with_pipeline_rank(row: Any) -> Any:
    return _renamed(row, "key", "pipeline_rank") if isinstance(row, Mapping) else row


def _renamed(table: Mapping[str, Any], older: str, newer: str) -> dict[str, Any]:
    """Return a table with one of its fields renamed, in the same order."""
    return {newer if name == older else name: value for name, value in table.items()}


def _update(data: dict[str, Any], key: str, **fields: Any) -> None:
    """Change fields of a table of the data, if it is one."""
    table = data.get(key)
    if isinstance(table, Mapping):
        data[key] = {**table, **fields}


STEPS: Mapping[str, MigrationStep] = {
    "pipeplan/1": MigrationStep(
        "pipeplan/2",
        _plan_with_cost_model,
        "plans name the revision of the cost model that predicted them",
    ),
    "pipeplan/2": MigrationStep(
        "pipeplan/3",
        _plan_with_time_provenance,
        "predicted.rests_on is called time_provenance",
    ),
    "pipeplan/3": MigrationStep(
        "pipeplan/4",
        _plan_with_space,
        "the job names the kinds of backward, and the bound the freedoms that it covers",
    ),
    "pipeplan/4": MigrationStep(
        "pipeplan/5",
        _plan_with_runtime,
        "plans name the rules of the runtime; older ones keep those of Pipeplan's own",
    ),
    "pipeplan/5": MigrationStep(
        "pipeplan/6",
        _with_links_in_turn,
        "plans name how messages have a link; in older ones they wait for each other",
    ),
    "pipeplan/6": MigrationStep(
        "pipeplan/7",
        _plan_with_newer_graph,
        "plans may have tensor-parallel groups as devices; older ones have none",
    ),
    "pipeplan/7": MigrationStep(
        "pipeplan/8",
        dict,
        "the job says whether replicas share the optimizer's state; in older plans none do",
    ),
    "pipeplan-graph/1": MigrationStep(
        "pipeplan-graph/2",
        dict,
        "layer graphs may say how layers split over tensor-parallel groups; older ones do not",
    ),
    "pipeplan-sweep/1": MigrationStep(
        "pipeplan-sweep/2",
        _sweep_with_cost_model,
        "sweeps name the revision of the cost model behind their times",
    ),
    "pipeplan-sweep/2": MigrationStep(
        "pipeplan-sweep/3",
        _with_own_runtime,
        "sweeps name the rules of the runtime; older ones keep those of Pipeplan's own",
    ),
    "pipeplan-sweep/3": MigrationStep(
        "pipeplan-sweep/4",
        _with_links_in_turn,
        "sweeps name how messages have a link; in older ones they wait for each other",
    ),
    "pipeplan-sweep/4": MigrationStep(
        "pipeplan-sweep/5",
        dict,
        "the job says how many devices a tensor-parallel group has; older sweeps have none",
    ),
    "pipeplan-sweep/5": MigrationStep(
        "pipeplan-sweep/6",
        dict,
        "the job says whether replicas share the optimizer's state; in older sweeps none do",
    ),
    "pipeplan-sync-trace/1": MigrationStep(
        "pipeplan-sync-trace/2",
        _sync_trace_with_pipeline_ranks,
        "key of a row is called pipeline_rank",
    ),
}
"""The steps by their older format."""


def steps_to(found: object, newest: str) -> tuple[MigrationStep, ...]:
    """Return the steps from one format to another in order; none if they do not lead there."""
    steps: list[MigrationStep] = []
    while found != newest:
        step = STEPS.get(found) if isinstance(found, str) else None
        if step is None:
            return ()
        steps.append(step)
        found = step.to
    return tuple(steps)


def migrate(data: Mapping[str, Any], newest: str, source: str) -> Mapping[str, Any]:
    """Return plain data of an older format in the newest one, and any other data as it is.

    Each step is logged as a warning.

    Args:
        data: the content of a file; it is not changed.
        newest: the format to reach.
        source: the file's name, for the warning.
    """
    for step in steps_to(data.get("format"), newest):
        logger.warning("%s: read from %s as %s: %s", source, data["format"], step.to, step.changes)
        data = {**step.apply(data), "format": step.to}
    return data


KINDS = {
    "pipeplan/8": "a plan",
    "pipeplan-graph/2": "a layer graph",
    "pipeplan-cluster/1": "a cluster file",
    "pipeplan-job/1": "a job file",
    "pipeplan-runtime/1": "a runtime file",
    "pipeplan-train/1": "a training file",
    "pipeplan-checkpoint/1": "a checkpoint's manifest",
    "pipeplan-timeline/1": "a measured timeline",
    "pipeplan-costs/1": "a costs file, as `pipeplan profile` writes it",
    "pipeplan-sync-trace/2": "a trace of synchronisation",
    "pipeplan-sweep/6": "the index of a sweep",
    "pipeplan-moves/1": "what a new plan moves",
}
"""Kinds of files by their newest ``format``."""
WRITTEN_ONLY = {"pipeplan-stages/1": "the stages of an export"}
"""Files for people's own scripts: Pipeplan writes them and never reads them."""


def read_formatted(path: str | Path, expected: str) -> Mapping[str, Any]:
    """Read a TOML or JSON file in the ``expected`` format; see :func:`check_format`."""
    return check_format(read_toml_or_json(path), expected, str(path))


def check_format(data: Any, expected: str, source: str) -> Mapping[str, Any]:
    """Return ``data`` as a mapping in the ``expected`` format; older formats are migrated.

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
    if other_kind == kind and is_number:
        older = [name for name in STEPS if name.startswith(f"{kind}/")]
        raise PipeplanError(
            f"{source}: format: {shorten(found)} is no format that this version of Pipeplan reads, "
            f"which are {', '.join([*older, expected])}; make the file again"
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
    """Return the newest format of a kind of file, by any format of the kind.

    Raises:
        PipeplanError: if it is not one of Pipeplan's formats.
    """
    kind = found.rpartition("/")[0] if isinstance(found, str) else None
    for newest in KINDS:
        if newest.rpartition("/")[0] == kind:
            return newest
    if kind in _kinds(WRITTEN_ONLY):
        raise PipeplanError(
            f"{source}: format: {shorten(found)} is {kind_of(found)}, which Pipeplan writes and "
            "never reads: there is nothing to migrate; export it again from the plan with "
            "`pipeplan export`"
        )
    raise PipeplanError(
        f"{source}: format: expected one of Pipeplan's, such as {next(iter(KINDS))!r}, found "
        f"{shorten(found)}; name a file that Pipeplan wrote or reads"
    )


def kind_of(found: object) -> str:
    """Return the kind of a file by its format, whatever the version."""
    kind = found.rpartition("/")[0] if isinstance(found, str) else None
    return _kinds({**KINDS, **WRITTEN_ONLY}).get(kind or "", "something else")


def _kinds(formats: Mapping[str, str]) -> dict[str, str]:
    """Return descriptions by kind: the format without its number."""
    return {newest.rpartition("/")[0]: name for newest, name in formats.items()}


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
            data: plain JSON values; older formats are migrated.
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
