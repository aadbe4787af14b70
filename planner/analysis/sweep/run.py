"""``sweep``: plans at many points, kept as they are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from planner.analysis.sweep.engines import Engine, InTurn
from planner.analysis.sweep.folder import SweepFolder
from planner.analysis.sweep.points import batches_of, points_of
from planner.analysis.sweep.rows import Bill, SweepRow, currency_of, require_bill, rows_of
from planner.analysis.sweep.work import Task
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import COST_MODEL
from planner.plan.problem import ModelSource, Problem, cluster_digest
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.runtimes import rules_of
from planner.plan.sweep_index import Point, SweepIndex, SweepSettings
from planner.search.settings import OPTIMALITY_TOLERANCE, check_settings

Progress = Callable[[int, int, SweepRow | None], None]
"""Called with the number of points done (those of earlier runs included), the number asked for, and
the point solved last; None at the start."""


@dataclass(frozen=True)
class SweepResult:
    """The points asked for that have a result.

    Attributes:
        model: name of its graph.
        folder: where their plans are.
        rows: in the order asked for, infeasible ones with their reason.
        currency: of the costs; None if the clusters name none, or have no prices.
        bill: what is paid for.
        open: points without a result, after Ctrl-C.
        solved: how many this run solved; the folder had the others.
    """

    model: str
    folder: Path
    rows: tuple[SweepRow, ...]
    currency: str | None
    bill: Bill
    open: tuple[Point, ...]
    solved: int

    @property
    def front(self) -> tuple[SweepRow, ...]:
        """The rows that no other dominates."""
        return tuple(row for row in self.rows if row.on_front)


def sweep(
    graphs: LayerGraph | Iterable[LayerGraph],
    clusters: Cluster | Mapping[str, Cluster],
    job: Job,
    folder: str | Path,
    *,
    microbatches: Sequence[int] = (),
    keep_batch: bool = False,
    devices: Sequence[int] = (),
    source: ModelSource | None = None,
    time_limit_s: float = 10.0,
    gap_limit: float = OPTIMALITY_TOLERANCE,
    seed: int = 0,
    deterministic: bool = False,
    engine: Engine | None = None,
    bill: Bill = "devices",
    runtime: RuntimeRules | None = None,
    progress: Progress = lambda done, total, row: None,
) -> SweepResult:
    """Find plans for all combinations of microbatches, numbers of devices and clusters.

    Points that the folder has are not solved again. A point where no plan fits says why; the sweep
    continues.

    Args:
        graphs: the model traced at each microbatch size.
        clusters: by labels, which stand in file names; one alone goes by its name.
        job: all but sizes and numbers of microbatches.
        folder: for plans and index; made if there is none.
        microbatches: numbers of them in an iteration; the job's by default.
        keep_batch: instead, as many as make the samples of the job's iteration.
        devices: numbers of devices, chosen by
            :func:`~planner.analysis.sweep.work.device_choices`; all of each cluster by default.
        source: how the executor can build the model again.
        time_limit_s: of each point, the choice of its devices included.
        gap_limit: a point's search ends at it.
        seed: of the searches.
        deterministic: the same rows on every machine, whatever the engine, by one solver thread for
            each point; the limit is in CP-SAT's deterministic seconds.
        engine: how points are solved; by default one after the other.
        bill: ``devices`` in use, or ``machines``: all devices of those that have one in use.
        runtime: that will train; by default the job's.
        progress: called once at the start, then as each point is done.

    Returns:
        A row for each point; after Ctrl-C for those found so far.

    Raises:
        PipeplanError: naming what is out of range, or why the folder cannot be used.
    """
    engine = engine or InTurn()
    workers = 1 if deterministic else engine.workers
    check_settings(time_limit_s, gap_limit, seed, workers)
    require_bill(bill)
    sized = _by_samples(graphs)
    named = {clusters.name: clusters} if isinstance(clusters, Cluster) else dict(clusters)
    currency = currency_of(named)
    rules, source = runtime or rules_of(job.runtime or "pipeplan"), source or ModelSource()
    job = job if runtime is None else job.model_copy(update={"runtime": rules.expresses})
    settings = {
        "time_limit_s": time_limit_s,
        "gap_limit": gap_limit,
        "seed": seed,
        "deterministic": deterministic,
    }
    index = SweepIndex(
        model=next(iter(sized.values())).name,
        factory=source.factory,
        arguments=dict(source.arguments),
        graphs={str(samples): graph.digest for samples, graph in sized.items()},
        clusters={label: cluster_digest(cluster) for label, cluster in named.items()},
        job=job,
        runtime=rules,
        settings=SweepSettings.parse(settings, "sweep"),
        cost_model=COST_MODEL,
    )
    batches = batches_of(job, sized, microbatches, keep_batch=keep_batch)
    problems = {
        point: _problem(point, sized, named, job, source, rules)
        for point in points_of(named, batches, devices)
    }
    with SweepFolder(folder, index, [*problems]) as kept:
        missing = [point for point in problems if kept.get(point) is None]
        tasks = [Task(point, problems[point], index.settings, workers) for point in missing]
        with suppress(KeyboardInterrupt):
            _solve(tasks, engine, kept, len(problems), bill, progress)
        found = [row for row in map(kept.get, problems) if row is not None]
        open_ = tuple(point for point in problems if kept.get(point) is None)
    return SweepResult(
        model=index.model,
        folder=kept.path,
        rows=rows_of(found, problems, bill),
        currency=currency,
        bill=bill,
        open=open_,
        solved=len(missing) - len(open_),
    )


def _solve(
    tasks: Sequence[Task],
    engine: Engine,
    folder: SweepFolder,
    total: int,
    bill: Bill,
    progress: Progress,
) -> None:
    """Solve points, each written as soon as it is found.

    Raises:
        KeyboardInterrupt: on Ctrl-C, when the engine has ended.
    """
    problems = {task.point: task.problem for task in tasks}
    before = total - len(tasks)
    progress(before, total, None)
    with closing(engine.run(tasks)) as outcomes:
        for done, (found, plan) in enumerate(outcomes, before + 1):
            folder.add(found, plan)
            progress(done, total, *rows_of([found], problems, bill))


def _problem(
    point: Point,
    graphs: Mapping[int, LayerGraph],
    clusters: Mapping[str, Cluster],
    job: Job,
    source: ModelSource,
    rules: RuntimeRules,
) -> Problem:
    """Return the problem of a point, with the whole cluster.

    Raises:
        PipeplanError: if model, cluster and job do not fit together.
    """
    samples, microbatches = point.samples_per_microbatch, point.microbatches
    job = job.model_copy(update={"samples_per_microbatch": samples, "microbatches": microbatches})
    try:
        return Problem(graphs[samples], clusters[point.cluster], job, source, rules)
    except PipeplanError as error:
        raise PipeplanError(
            f"cluster {point.cluster}: {problem}" for problem in error.problems
        ) from None


def _by_samples(graphs: LayerGraph | Iterable[LayerGraph]) -> dict[int, LayerGraph]:
    rows = [graphs] if isinstance(graphs, LayerGraph) else list(graphs)
    found = {graph.record.samples_per_microbatch: graph for graph in rows}
    if not found:
        raise PipeplanError("graphs: none given; trace the model at each size of a microbatch")
    if len(found) < len(rows):
        raise PipeplanError("graphs: two have microbatches of equal size; give one for each size")
    return found
