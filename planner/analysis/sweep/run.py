"""``sweep``: plans at many points, kept as they are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.analysis.sweep.engines import Limits, Task, in_turn, on_ray
from planner.analysis.sweep.points import Point, batches_of, points_of
from planner.analysis.sweep.rows import SweepRow, currency_of, row_of, with_front
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import COST_MODEL, Plan
from planner.plan.problem import ModelSource, Problem, cluster_digest
from planner.plan.runtime_rules import RuntimeRules
from planner.plan.runtimes import rules_of
from planner.plan.sweep_index import INDEX_NAME, SweepIndex
from planner.verification import save_valid

SWEPT_JOB_FIELDS = {
    *("name", "samples_per_microbatch", "microbatches", "model_arguments", "epoch_samples")
}
"""Job fields that a sweep varies, that change no plan, or that its source has."""


@dataclass(frozen=True)
class SweepResult:
    """The points asked for that have a result.

    Attributes:
        model: name of its graph.
        folder: where their plans are.
        rows: in the order asked for, infeasible ones with their reason.
        currency: of the costs; None if the clusters name none, or have no prices.
        open: points without a result, after Ctrl-C.
        solved: how many this run solved; the folder had the others.
    """

    model: str
    folder: Path
    rows: tuple[SweepRow, ...]
    currency: str | None
    open: tuple[Point, ...]
    solved: int

    @property
    def front(self) -> tuple[SweepRow, ...]:
        """The rows that no other dominates."""
        return tuple(row for row in self.rows if row.on_front)


Progress = Callable[[int, int, SweepRow | None], None]
"""Called with the number of points done (those of earlier runs included), the number asked for, and
the point solved last; None at the start."""


def sweep(
    graphs: LayerGraph | Iterable[LayerGraph],
    clusters: Cluster | Mapping[str, Cluster],
    job: Job,
    folder: str | Path,
    *,
    microbatches: Sequence[int] = (),
    global_batch: int | None = None,
    devices: Sequence[int] = (),
    source: ModelSource | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    deterministic: bool = False,
    ray: str | None = None,
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
        global_batch: samples of an iteration; instead, as many microbatches as make these.
        devices: numbers of devices, chosen by
            :func:`~planner.analysis.sweep.devices.device_choices`; all of each cluster by default.
        source: how the executor can build the model again.
        time_limit_s: of each point, the choice of its devices included.
        seed: of the searches.
        deterministic: the same rows on every machine, by one solver thread for each point; the
            limit is in CP-SAT's deterministic seconds.
        ray: address of the Ray cluster that solves the points, see
            :func:`~planner.analysis.sweep.engines.on_ray`; None: this process, in turn.
        runtime: that will train; by default the job's.
        progress: called once at the start, then as each point is done.

    Returns:
        A row for each point; after Ctrl-C for those found so far.

    Raises:
        PipeplanError: naming what is out of range, or why the folder cannot be used.
    """
    sized, limits = _by_samples(graphs), Limits(time_limit_s, seed, deterministic)
    named = {clusters.name: clusters} if isinstance(clusters, Cluster) else dict(clusters)
    currency = currency_of(named)
    rules, source = runtime or rules_of(job.runtime or "pipeplan"), source or ModelSource()
    job = job if runtime is None else job.model_copy(update={"runtime": rules.expresses})
    tasks = [
        Task(point, _problem(point, sized, named, job, source, rules), limits)
        for point in points_of(named, batches_of(job, sized, microbatches, global_batch), devices)
    ]
    kept = _Kept(Path(folder), _inputs(sized, named, job, source, rules, limits))
    rows = {task.point: row for task in tasks if (row := kept.row(task)) is not None}
    missing = {task.point: task for task in tasks if task.point not in rows}
    with suppress(KeyboardInterrupt):
        progress(len(rows), len(tasks), None)
        asked = [*missing.values()]
        with closing(in_turn(asked) if ray is None else on_ray(asked, ray)) as outcomes:
            for point, found in outcomes:
                rows[point] = kept.add(missing[point], found)
                progress(len(rows), len(tasks), rows[point])
    return SweepResult(
        model=next(iter(sized.values())).name,
        folder=kept.path,
        rows=with_front([rows[task.point] for task in tasks if task.point in rows]),
        currency=currency,
        open=tuple(task.point for task in tasks if task.point not in rows),
        solved=sum(point in rows for point in missing),
    )


def _by_samples(graphs: LayerGraph | Iterable[LayerGraph]) -> dict[int, LayerGraph]:
    rows = [graphs] if isinstance(graphs, LayerGraph) else list(graphs)
    found = {graph.record.samples_per_microbatch: graph for graph in rows}
    if not found:
        raise PipeplanError("graphs: none given; trace the model at each size of a microbatch")
    if len(found) < len(rows):
        raise PipeplanError("graphs: two have microbatches of equal size; give one for each size")
    return found


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
    samples = point.samples_per_microbatch
    batch = {"samples_per_microbatch": samples, "microbatches": point.microbatches}
    job = job.model_copy(update={**batch, "microbatch_sizes": ()})
    try:
        return Problem(graphs[samples], clusters[point.cluster], job, source, rules)
    except PipeplanError as error:
        raise PipeplanError(
            f"cluster {point.cluster}: {problem}" for problem in error.problems
        ) from None


# --- the folder -----------------------------------------------------------------------------------


def _inputs(
    graphs: Mapping[int, LayerGraph],
    clusters: Mapping[str, Cluster],
    job: Job,
    source: ModelSource,
    rules: RuntimeRules,
    limits: Limits,
) -> dict[str, Any]:
    """Return what all points of a folder share, by name; graphs and clusters may be added."""
    return {
        "model": next(iter(graphs.values())).name,
        "factory": source.factory,
        "arguments": dict(source.arguments),
        **{f"graphs.{samples}": graph.digest for samples, graph in graphs.items()},
        **{f"clusters.{label}": cluster_digest(cluster) for label, cluster in clusters.items()},
        **{f"job.{k}": v for k, v in job.model_dump(mode="json", exclude=SWEPT_JOB_FIELDS).items()},
        "runtime": rules.model_dump(mode="json"),
        **vars(limits),
        "cost_model": COST_MODEL,
    }


class _Kept:
    """The folder of a sweep: plans and their index, written as they are found.

    Args:
        path: of the folder; made if there is none.
        inputs: of the sweep.

    Raises:
        PipeplanError: if it cannot be made, holds other files, or points of another sweep.
    """

    def __init__(self, path: Path, inputs: dict[str, Any]) -> None:
        self.path, index_path = path, path / INDEX_NAME
        require_folder(path)
        index = SweepIndex.load(index_path) if index_path.exists() else SweepIndex(inputs=inputs)
        if differences := [*index.differences(inputs)]:
            raise PipeplanError(
                f"{index_path}: {difference}; points of different sweeps do not compare: name "
                "another folder, or sweep as before"
                for difference in differences
            )
        self._index = index.model_copy(update={"inputs": {**index.inputs, **inputs}})
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise PipeplanError(f"{path}: the folder cannot be made: {error.strerror}") from None
        self._index.save(index_path)

    def row(self, task: Task) -> SweepRow | None:
        """Return the result of a point; None if there is none yet."""
        name = task.point.plan_name
        if name in self._index.no_plan:
            return SweepRow(task.point, reason=self._index.no_plan[name])
        path = self.path / name
        return row_of(task.point, task.problem, Plan.load(path)) if path.is_file() else None

    def add(self, task: Task, found: Plan | str) -> SweepRow:
        """Write a plan, or note in the index why there is none."""
        name = task.point.plan_name
        if isinstance(found, Plan):
            save_valid(found, self.path / name)
            return row_of(task.point, task.problem, found)
        no_plan = {**self._index.no_plan, name: found}
        self._index = self._index.model_copy(update={"no_plan": no_plan})
        self._index.save(self.path / INDEX_NAME)
        return SweepRow(task.point, reason=found)


def require_folder(path: Path) -> None:
    """Refuse a path that cannot be a sweep's folder, before the work that would be lost.

    Raises:
        PipeplanError: if it is a file, holds other files, or there is no folder above it.
    """
    if path.exists() and not path.is_dir():
        raise PipeplanError(f"{path}: is a file; a sweep needs a folder, name another")
    if not path.exists() and not path.parent.is_dir():
        raise PipeplanError(
            f"{path}: the folder cannot be made: there is no folder {path.parent}; create it"
        )
    if path.exists() and not (path / INDEX_NAME).exists() and any(path.iterdir()):
        raise PipeplanError(
            f"{path}: the folder holds other files and no {INDEX_NAME} of a sweep; name a new one"
        )
