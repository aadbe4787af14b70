"""Published runs as plans of ours, and the report of their predicted and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from benchmarks.catalogue import PUBLISHED_MEDIAN_BAR, PUBLISHED_WORST_BAR
from benchmarks.published.host_time import HostTime, HostTimes, host_lines
from benchmarks.reporting.report import heading, table
from planner.interop.adopt.adopt import adopt
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.plan.runtime_rules import PIPEPLAN, RuntimeRules


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
        host: what the runtime's host adds to it; None: nothing is known to.
        gives_host: whether that is found from this row, which is then not scored.
    """

    source: Source
    name: str
    measured_s: float
    problem: Problem
    runtime: RuntimeRules
    stages: tuple[tuple[str, ...], ...]
    replicas: int = 1
    schedule: str | None = None
    pipeline_size: int | None = None
    contradiction: str = ""
    host: HostTime | None = None
    gives_host: bool = False

    @property
    def is_scored(self) -> bool:
        """Whether its error counts."""
        return not (self.contradiction or self.gives_host)


@dataclass(frozen=True)
class Prediction:
    """A published run beside our prediction, with and without host times of its runtime."""

    run: PublishedRun
    plan: Plan
    without_host_s: float

    @cached_property
    def predicted_s(self) -> float:
        """Seconds that the plan is predicted to take."""
        return self.plan.predicted.iteration_time_s

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.run.measured_s - 1

    @property
    def error_without_host(self) -> float:
        """The error of the prediction without host times."""
        return self.without_host_s / self.run.measured_s - 1


def predict(run: PublishedRun, *, by_runtime: bool, hosts: HostTimes | None = None) -> Prediction:
    """Predict a published run from its own layer times and links.

    This is the one place that decides whose runtime is replayed.

    Args:
        run: the row.
        by_runtime: whether it is replayed by the rules of the runtime that was used; otherwise as
            our own executor would run it, with messages that overlap computation.
        hosts: host times of runtimes; None: without.
    """
    plan = adopted(run, run.runtime if by_runtime else PIPEPLAN)
    without_s = plan.predicted.iteration_time_s
    if by_runtime and hosts and run.host in hosts:
        plan = adopted(run, run.host.rules(run.runtime, hosts[run.host]))
    return Prediction(run, plan, without_s)


def adopted(run: PublishedRun, rules: RuntimeRules) -> Plan:
    """Return the layout of a run as a plan for a runtime."""
    return adopt(
        replace(run.problem, runtime=rules),
        run.stages,
        schedule=run.schedule,
        pipeline_size=run.pipeline_size,
        replicas=run.replicas,
    )


def host_times(runs: Sequence[PublishedRun]) -> HostTimes:
    """Return the host times that rows give, one each."""
    return {run.host: _host_time(run, run.host) for run in runs if run.host and run.gives_host}


def _host_time(run: PublishedRun, host: HostTime) -> float:
    return host.found(
        run.measured_s,
        lambda value: adopted(run, host.rules(run.runtime, value)).predicted.iteration_time_s,
    )


@dataclass(frozen=True)
class Summary:
    """Errors of some rows, without sign."""

    rows: int
    median: float
    worst: float
    bias: float
    median_without_host: float
    worst_without_host: float

    @classmethod
    def of(cls, rows: Sequence[Prediction]) -> Summary:
        """Return the summary of at least one row."""
        sizes = [abs(row.error) for row in rows]
        without = [abs(row.error_without_host) for row in rows]
        bias = median(row.error for row in rows)
        return cls(len(rows), median(sizes), max(sizes), bias, median(without), max(without))

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table."""
        sizes = (self.median, self.worst, self.median_without_host, self.worst_without_host)
        middle, worst, *without = (f"{size:.1%}" for size in sizes)
        return str(self.rows), middle, worst, f"{self.bias:+.1%}", *without


def scored(rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the rows whose figures do not contradict each other, and which give no host time."""
    return [row for row in rows if row.run.is_scored]


def sources_of(rows: Sequence[Prediction]) -> list[Source]:
    """Return the sources in the order of their first rows."""
    return list(dict.fromkeys(row.run.source for row in rows))


COLUMNS = ("run", "measured s", "predicted s", "error", "without host time")


def cells(row: Prediction) -> tuple[str, ...]:
    """Return the cells of a row."""
    error = f"{row.error:+.1%}" + ("" if row.run.is_scored else " (not scored)")
    seconds = (f"{row.run.measured_s:.4g}", f"{row.predicted_s:.4g}")
    return row.run.name, *seconds, error, f"{row.error_without_host:+.1%}"


SUMMARY_COLUMNS = (
    "source",
    "what",
    "rows",
    "median error",
    "worst",
    "median with sign",
    "median without host time",
    "worst without",
)


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
    hosts: HostTimes | None = None,
) -> str:
    """Return the page.

    Args:
        rows: all predictions.
        command: that made the page.
        by_runtime: as of :func:`predict`.
        hosts: as of :func:`predict`.
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
        f"is fitted to a row that is scored. Replayed as {replay}. Bars: median "
        f"{PUBLISHED_MEDIAN_BAR:.0%}, worst {PUBLISHED_WORST_BAR:.0%}; found: median "
        f"{whole.median:.1%}, worst {whole.worst:.1%}; without host times, which fits nothing at "
        f"all: median {whole.median_without_host:.1%}, worst {whole.worst_without_host:.1%}.\n",
        *_hosts(rows, hosts or {}),
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
            f"- {row.run.name}: not scored, "
            f"{row.run.contradiction or 'the host time is found from it'}.\n"
            for row in own
            if not row.run.is_scored
        ]
    return "\n".join(parts)


def _hosts(rows: Sequence[Prediction], hosts: HostTimes) -> list[str]:
    """Return what host times are used, and where each is from."""
    if not hosts:
        return []
    names = {row.run.host: row.run.name for row in rows if row.run.host and row.run.gives_host}
    first = (
        "No source publishes what its host adds to an operation or a message. Each of these is "
        "found from one row, which is not scored:\n"
    )
    return [first, "".join(host_lines(hosts, names))]
