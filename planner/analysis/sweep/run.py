"""``sweep``: plans at many points, kept as they are found."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class SweepProgress:
    """A point is done.

    Attributes:
        done: points with an answer, those of earlier runs included.
        total: points asked for.
        row: of this point; None for the first call, which is about what earlier runs found.
    """

    done: int
    total: int
    row: SweepRow | None


@dataclass(frozen=True)
class SweepResult:
    """The points asked for that have an answer.

    Attributes:
        model: name of its graph.
        folder: where their plans are.
        rows: in the order asked for, infeasible ones with their reason.
        currency: of the costs; None if the clusters name none, or have no prices.
        bill: what is paid for.
        open: points without an answer, after Ctrl-C.
        solved: how many this run solved; the others were there already.
        others: points in the folder that were not asked for.
    """

    model: str
    folder: Path
    rows: tuple[SweepRow, ...]
    currency: str | None
    bill: Bill
    open: tuple[Point, ...]
    solved: int
    others: int

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
    workers: int | None = None,
    engine: Engine | None = None,
    bill: str = "devices",
    runtime: RuntimeRules | None = None,
    progress: Callable[[SweepProgress], None] | None = None,
) -> SweepResult:
    """Find plans for all combinations of microbatches, numbers of devices and clusters.

    Points that the folder has are not solved again. A point where no plan fits says why and stops
    nothing.

    Args:
        graphs: the model traced at each size of a microbatch.
        clusters: by labels, which stand in file names; one alone goes by its name.
        job: all but sizes and numbers of microbatches.
        folder: for plans and index; made if there is none.
        microbatches: numbers of them in an iteration; the job's by default.
        keep_batch: instead, as many as make the samples of the job's iteration.
        devices: numbers of devices, chosen by
        :func:`~planner.analysis.sweep.work.device_choices`;
            all of each cluster by default.
        source: how the executor can build the model again.
        time_limit_s: of each point, the choice of its devices included.
        gap_limit: a point's search ends at it.
        seed: of the searches.
        deterministic: the same rows on every machine, whatever the engine; the limit is in
            CP-SAT's deterministic seconds then.
        workers: solver threads of each point; by default what suits the engine, one in
            deterministic mode.
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
    default = 1 if deterministic else engine.workers
    the_workers = default if workers is None else workers
    check_settings(time_limit_s, gap_limit, seed, the_workers)
    settings = {
        "time_limit_s": time_limit_s,
        "gap_limit": gap_limit,
        "seed": seed,
        "deterministic": deterministic,
    }
    named = {clusters.name: clusters} if isinstance(clusters, Cluster) else dict(clusters)
    rules = runtime or rules_of(job.runtime or "pipeplan")
    run = _Sweep(
        graphs=_by_samples(graphs),
        clusters=named,
        job=job if runtime is None else job.model_copy(update={"runtime": rules.expresses}),
        rules=rules,
        source=source or ModelSource(),
        settings=SweepSettings.parse(settings, "sweep"),
        workers=the_workers,
        bill=require_bill(bill),
        currency=currency_of(named),
    )
    batches = batches_of(job, run.graphs, microbatches, keep_batch=keep_batch)
    points = points_of(named, batches, devices)
    return run.solve(points, folder, engine, progress or (lambda row: None))


@dataclass(frozen=True)
class _Sweep:
    """Figures that all points share."""

    graphs: Mapping[int, LayerGraph]
    clusters: Mapping[str, Cluster]
    job: Job
    rules: RuntimeRules
    source: ModelSource
    settings: SweepSettings
    workers: int
    bill: Bill
    currency: str | None

    @property
    def model(self) -> str:
        """Name of its graph."""
        return str(next(iter(self.graphs.values())).name)

    def solve(
        self,
        points: Sequence[Point],
        path: str | Path,
        engine: Engine,
        progress: Callable[[SweepProgress], None],
    ) -> SweepResult:
        """Solve what is missing in the folder, then return everything asked for."""
        problems = {point: self._problem(point) for point in points}
        with SweepFolder(path, self._index()) as folder:
            missing = [point for point in points if folder.get(point) is None]
            done = len(points) - len(missing)
            progress(SweepProgress(done, len(points), None))
            tasks = [Task(point, problems[point], self.settings, self.workers) for point in missing]
            with suppress(KeyboardInterrupt), closing(self._solved(tasks, folder, engine)) as rows:
                for number, row in enumerate(rows, done + 1):
                    progress(SweepProgress(number, len(points), row))
            return self._result(problems, folder, len(missing))

    def _solved(
        self, tasks: Sequence[Task], folder: SweepFolder, engine: Engine
    ) -> Generator[SweepRow, None, None]:
        """Yield each point as soon as it is on disk."""
        problems = {task.point: task.problem for task in tasks}
        with closing(engine.run(tasks)) as outcomes:
            for outcome in outcomes:
                folder.add(outcome)
                yield from rows_of([outcome.found], problems, self.bill)

    def _result(
        self, problems: Mapping[Point, Problem], folder: SweepFolder, missing: int
    ) -> SweepResult:
        found = [row for row in map(folder.get, problems) if row is not None]
        open_ = tuple(point for point in problems if folder.get(point) is None)
        return SweepResult(
            model=self.model,
            folder=folder.path,
            rows=rows_of(found, problems, self.bill),
            currency=self.currency,
            bill=self.bill,
            open=open_,
            solved=missing - len(open_),
            others=folder.points - len(found),
        )

    def _problem(self, point: Point) -> Problem:
        """Return the problem of a point, with the whole cluster.

        Raises:
            PipeplanError: if model, cluster and job do not fit together.
        """
        sizes = {
            "samples_per_microbatch": point.samples_per_microbatch,
            "microbatches": point.microbatches,
        }
        job = self.job.model_copy(update=sizes)
        cluster = self.clusters[point.cluster]
        try:
            graph = self.graphs[point.samples_per_microbatch]
            return Problem(graph, cluster, job, self.source, self.rules)
        except PipeplanError as error:
            raise PipeplanError(
                f"cluster {point.cluster}: {problem}" for problem in error.problems
            ) from None

    def _index(self) -> SweepIndex:
        return SweepIndex(
            model=self.model,
            factory=self.source.factory,
            arguments=dict(self.source.arguments),
            graphs={str(samples): graph.digest for samples, graph in self.graphs.items()},
            clusters={label: cluster_digest(c) for label, c in self.clusters.items()},
            job=self.job,
            runtime=self.rules,
            settings=self.settings,
            cost_model=COST_MODEL,
        )


def _by_samples(graphs: LayerGraph | Iterable[LayerGraph]) -> dict[int, LayerGraph]:
    rows = [graphs] if isinstance(graphs, LayerGraph) else list(graphs)
    found = {graph.record.samples_per_microbatch: graph for graph in rows}
    if not found:
        raise PipeplanError("graphs: none given; trace the model at each size of a microbatch")
    if len(found) < len(rows):
        raise PipeplanError("graphs: two have microbatches of equal size; give one for each size")
    return found
