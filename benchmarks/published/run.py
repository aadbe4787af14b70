"""Published runs as plans of ours, and the report of their predicted and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from benchmarks.catalogue import PUBLISHED_MEDIAN_BAR, PUBLISHED_WORST_BAR
from benchmarks.published.files import COLUMNS as FILE_COLUMNS
from benchmarks.reporting.report import heading, table
from planner.interop.adopt.adopt import adopt
from planner.job import Runtime
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtimes import rules_of


@dataclass(frozen=True)
class Source:
    """A publication and what it measured.

    Attributes:
        publication: the paper, one for several clusters and models.
        name: model and cluster.
        cites: where layer times, links and measured iterations stand.
        states: what the source leaves open and is assumed here.
    """

    publication: str
    name: str
    cites: str
    states: str


@dataclass(frozen=True)
class PublishedRun:
    """A layout that somebody ran, with the measured time of an iteration.

    Attributes:
        source: who measured it.
        name: of the row.
        measured_s: seconds of an iteration.
        problem: layers, links and job, from the source's own files.
        runtime: what trained.
        stages: the layers of each stage.
        replicas: data parallelism.
        schedule: a name that ``adopt`` knows; None: 1F1B.
        pipeline_size: pipeline ranks; None: as many as stages.
        contradiction: why the row's figures cannot be of one run, by its own files alone; empty:
            they can. Such rows are shown, not scored.
    """

    source: Source
    name: str
    measured_s: float
    problem: Problem
    runtime: Runtime
    stages: tuple[tuple[str, ...], ...]
    replicas: int = 1
    schedule: str | None = None
    pipeline_size: int | None = None
    contradiction: str = ""


@dataclass(frozen=True)
class Prediction:
    """A published run beside our prediction."""

    run: PublishedRun
    plan: Plan

    @cached_property
    def predicted_s(self) -> float:
        """Seconds that the plan is predicted to take."""
        return self.plan.predicted.iteration_time_s

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.run.measured_s - 1


def predict(run: PublishedRun, *, by_runtime: bool) -> Prediction:
    """Predict a published run from its own layer times and links.

    This is the one place that decides whose runtime is replayed.

    Args:
        run: the row.
        by_runtime: whether it is replayed by the rules of the runtime that was used; otherwise as
            our own executor would run it, with messages that overlap computation.
    """
    rules = rules_of(run.runtime if by_runtime else "pipeplan")
    plan = adopt(
        replace(run.problem, runtime=rules),
        run.stages,
        schedule=run.schedule,
        pipeline_size=run.pipeline_size,
        replicas=run.replicas,
    )
    return Prediction(run, plan)


@dataclass(frozen=True)
class Summary:
    """Errors of some rows, without sign."""

    rows: int
    median: float
    worst: float
    bias: float

    @classmethod
    def of(cls, rows: Sequence[Prediction]) -> Summary:
        """Return the summary of at least one row."""
        sizes = [abs(row.error) for row in rows]
        return cls(len(rows), median(sizes), max(sizes), median(row.error for row in rows))

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table."""
        return str(self.rows), f"{self.median:.1%}", f"{self.worst:.1%}", f"{self.bias:+.1%}"


def scored(rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the rows whose own figures do not contradict each other."""
    return [row for row in rows if not row.run.contradiction]


def sources_of(rows: Sequence[Prediction]) -> list[Source]:
    """Return the sources in the order of their first rows."""
    return list(dict.fromkeys(row.run.source for row in rows))


COLUMNS = ("run", "measured s", "predicted s", "error")


def cells(row: Prediction) -> tuple[str, ...]:
    """Return the cells of a row."""
    error = f"{row.error:+.1%}" + (" (not scored)" if row.run.contradiction else "")
    return row.run.name, f"{row.run.measured_s:.4g}", f"{row.predicted_s:.4g}", error


SUMMARY_COLUMNS = ("source", "what", "rows", "median error", "worst", "median with sign")


def summary_rows(rows: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Return a line of errors for each source, and one of all rows."""
    found = []
    for source in sources_of(rows):
        own = scored([row for row in rows if row.run.source == source])
        if own:
            found.append((source.publication, source.name, *Summary.of(own).cells))
    return [*found, ("all", "", *Summary.of(scored(rows)).cells)]


def report(
    rows: Sequence[Prediction],
    command: str,
    *,
    by_runtime: bool,
    files: Sequence[tuple[str, ...]] = (),
) -> str:
    """Return the page.

    Args:
        rows: all predictions.
        command: that made the page.
        by_runtime: as of :func:`predict`.
        files: rows of :mod:`benchmarks.published.files`.
    """
    whole = Summary.of(scored(rows))
    publications = {source.publication for source in sources_of(rows)}
    replay = (
        "the runtime that was used (`--runtime theirs`)"
        if by_runtime
        else "our own executor: messages overlap computation (`--runtime ours`)"
    )
    parts = [
        heading("Published runs of others against our predictions", command),
        f"{whole.rows} rows of {len(publications)} publications, each predicted from the layer "
        "times and links that its authors published, with their layout adopted as a plan; nothing "
        f"is fitted. Replayed as {replay}. Bars: median {PUBLISHED_MEDIAN_BAR:.0%}, worst "
        f"{PUBLISHED_WORST_BAR:.0%}; found: median {whole.median:.1%}, worst {whole.worst:.1%}.\n",
        table(SUMMARY_COLUMNS, summary_rows(rows)),
    ]
    for source in sources_of(rows):
        own = [row for row in rows if row.run.source == source]
        parts += [
            f"## {source.publication}: {source.name}\n",
            f"{source.cites}\n\n{source.states}\n",
            table(COLUMNS, [cells(row) for row in own]),
        ]
        parts += [
            f"- {row.run.name}: not scored, {row.run.contradiction}.\n"
            for row in own
            if row.run.contradiction
        ]
    if files:
        parts += [
            "## Real files that can be imported\n",
            "All files of these kinds in the checkouts, each with every choice that it leaves.\n",
            table(FILE_COLUMNS, files),
        ]
    return "\n".join(parts)
