"""Sailor's own settings: its plans and ours, judged by our simulator and by Sailor's.

The folder of ``--published`` has ``sailor/``: of each cluster N (``32_96`` is 32 A100 and 96 V100)
and samples a microbatch M, ``g_M.json`` (layer graph), ``c_N_M.toml`` (cluster), ``j_M_any.toml``
and ``j_M_eq.toml`` (jobs with any and with equal pipelines), ``ad_N.json`` (the plan of Sailor's
own planner), and ``sailor_rt.toml`` (its rule for messages, which block).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import Claim, Result, Row, counted
from benchmarks.plans.cases import Case
from benchmarks.plans.drawn import Data
from benchmarks.plans.runs import Run, Series, Settings, run_all, this_build
from benchmarks.plans.worker import problem_of
from planner import PipeplanError, Plan, adopt
from planner.verification import require_valid

FIGURES = ROOT / "benchmarks" / "results" / "sailor.json"
"""What Sailor's own simulator says of plans, by their stages, and the CPU seconds of planners."""
BATCH = 1024
"""Samples an iteration."""
SETTINGS = (("32_96", 2), ("80_240", 1), ("128_384", 1))
"""Clusters, with the samples a microbatch of Sailor's plans."""
ROUNDED_UP = "blocking, equal pipelines, rounded up"
"""An iteration has as many microbatches as Sailor's plan runs, whose equal pipelines each take
their share, rounded up."""
MESSAGES = {
    "overlapped": "any",
    "blocking": "any",
    "blocking, equal pipelines": "eq",
    ROUNDED_UP: "eq",
}
"""Rules for messages, with the pipelines of the job."""


@dataclass(frozen=True)
class Setting:
    """A cluster of Sailor's figure 8b under a rule for messages.

    Attributes:
        folder: with the files of all settings.
        cluster: its name in them.
        samples: of a microbatch.
        messages: a key of :data:`MESSAGES`.
    """

    folder: Path
    cluster: str
    samples: int
    messages: str

    @property
    def name(self) -> str:
        """Cluster and messages."""
        return f"{self.cluster.replace('_', '+')}, {self.messages}"

    def data(self) -> Data:
        """Return graph, cluster, job and, of blocking messages, runtime as data of files."""
        job = f"j_{self.samples}_{MESSAGES[self.messages]}"
        tables = {"cluster": f"c_{self.cluster}_{self.samples}", "job": job}
        if self.messages != "overlapped":
            tables["runtime"] = "sailor_rt"
        read = {
            what: tomllib.loads((self.folder / f"{name}.toml").read_text())
            for what, name in tables.items()
        }
        if self.messages == ROUNDED_UP:
            read["job"]["microbatches"] += self.more_microbatches
        return {"graph": json.loads((self.folder / f"g_{self.samples}.json").read_text()), **read}

    @property
    def more_microbatches(self) -> int:
        """How many more microbatches Sailor's equal pipelines run, each its share rounded up."""
        return -BATCH // self.samples % len(self._their_stages()[0]["devices"])

    def theirs(self) -> Plan:
        """Return the plan of Sailor's planner, with as many microbatches as ours.

        Raises:
            PipeplanError: if the plan is not valid.
        """
        data, stages = self.data(), self._their_stages()
        problem = problem_of({**data, "job": {**data["job"], "equal_pipelines": False}})
        plan = adopt(
            problem,
            [stage["layers"] for stage in stages],
            replicas=len(stages[0]["devices"]),
            devices=[name for stage in stages for name in stage["devices"]],
        )
        require_valid(plan, "Sailor's plan")
        return plan

    def _their_stages(self) -> list[dict[str, Any]]:
        path = self.folder / f"ad_{self.cluster}.json"
        stages: list[dict[str, Any]] = json.loads(path.read_text())["stages"]
        return stages


def settings_of(published: Path) -> list[Setting]:
    """Return all settings, the clusters one after the other.

    Raises:
        PipeplanError: if the folder lacks Sailor's files.
    """
    folder = published / "sailor"
    if not (folder / "sailor_rt.toml").is_file():
        raise PipeplanError(f"--published {published}: has no sailor/sailor_rt.toml; see --help")
    rows = [Setting(folder, *row, messages) for row in SETTINGS for messages in MESSAGES]
    return [row for row in rows if row.messages != ROUNDED_UP or row.more_microbatches]


def shape_of(samples: int, stages: Sequence[dict[str, Any]], layers: Sequence[str]) -> str:
    """Return what Sailor's simulator reads of a plan, such as ``2: 0-12 3a 24v, 13-25 27a``.

    Samples a microbatch, then of each stage its layers and its replicas in order: ``a`` is one
    A100, ``v`` a group of four V100.
    """
    rows = []
    for stage in stages:
        first, last = (layers.index(stage["layers"][end]) for end in (0, -1))
        kinds = groupby(device[0] for device in stage["devices"])
        runs = " ".join(f"{len(list(group))}{kind}" for kind, group in kinds)
        rows.append(f"{first}-{last} {runs}")
    return f"{samples}: {', '.join(rows)}"


def section(options: argparse.Namespace) -> Result:
    """Sailor's figure 8b, both judges."""
    settings, figures = settings_of(options.published), json.loads(FIGURES.read_text())
    with tempfile.TemporaryDirectory() as name:
        runs = _runs(settings, options.seconds, options.keep or Path(name))
        found = {row["problem"]: row for row in run_all(runs, (), 1)}
        rows = [
            _row(setting, found[setting.name], run, figures)
            for setting, run in zip(settings, runs, strict=True)
        ]
    return Result(rows, list(_claims(rows)))


def _runs(settings: Sequence[Setting], seconds: float, output: Path) -> list[Run]:
    build = this_build()
    series, shared = Series(build, build.digest()), Settings(output)
    cases = [Case(row.name, row.messages, row.data) for row in settings]
    return [Run("sailor", case, series, seconds, 0, shared) for case in cases]


def _row(setting: Setting, found: Row, run: Run, figures: Data) -> Row:
    """Return a row of the table.

    Raises:
        PipeplanError: if our search found no plan.
    """
    if "time_s" not in found:
        raise PipeplanError(f"{setting.name}: {found.get('error')}")
    their_s = (theirs := setting.theirs()).predicted.iteration_time_s
    layers = [layer["name"] for layer in setting.data()["graph"]["layers"]]
    stages = json.loads(gzip.decompress(run.kept.read_bytes()))["stages"]
    shapes = [
        shape_of(setting.samples, each, layers)
        for each in (stages, [{"layers": s.layers, "devices": s.devices} for s in theirs.stages])
    ]
    ours, other = (figures["simulator_s"].get(shape) for shape in shapes)
    reached = [cpu_s for cpu_s, time_s, _ in found["curve"] if time_s and time_s <= their_s]
    return {
        "A100 + V100": setting.cluster.replace("_", " + "),
        "messages": setting.messages,
        "Sailor's plan, s": their_s,
        "ours, s": found["time_s"],
        "theirs / ours": their_s / found["time_s"],
        "bound, s": found["bound_s"],
        "gap, %": 100 * (1 - found["bound_s"] / found["time_s"]),
        "as good after, CPU s": min(reached, default=None),
        "Sailor's planner, CPU s": figures["planner_cpu_s"][setting.cluster],
        "ended after, CPU s": found["cpu_s"],
        "Sailor's simulator: its plan, s": other,
        "Sailor's simulator: ours, s": ours,
        "our plan": shapes[0],
    }


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield the bars of the table."""
    ratios = [row["theirs / ours"] for row in rows]
    yield counted("Sailor's plan is not faster by our simulator", (r >= 1 for r in ratios))
    mean = statistics.geometric_mean(ratios)
    yield Claim("Sailor's plan over ours by our simulator, geometric mean", mean, at_least=1.15)
    told = [
        row["Sailor's simulator: its plan, s"] / row["Sailor's simulator: ours, s"]
        for row in rows
        if row["messages"] == "blocking, equal pipelines"
        and row["Sailor's simulator: ours, s"] is not None
    ]
    theirs = statistics.geometric_mean(told) if told else None
    yield Claim("the same by Sailor's simulator, planned under its rules", theirs, at_least=1.0)
