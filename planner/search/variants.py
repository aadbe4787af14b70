"""The problem with each size of microbatches and of tensor-parallel groups that its job allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.cluster.group_packing import packed
from planner.errors import PipeplanError
from planner.job import WITHOUT_GROUPS
from planner.model.group_graph import split_of
from planner.plan.problem import Problem
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.search.microbatches import of_each_size
from planner.search.mixed_groups import mixed_packings
from planner.units import plural


@dataclass(frozen=True)
class Variant:
    """The problem with microbatches and groups of one size, or groups of one for each kind of node.

    Attributes:
        problem: whose devices are the groups.
        whole: the problem of single devices.
        parallel: the groups; None: single devices.
        samples: of a microbatch, where the job leaves them open; None: it does not.
    """

    problem: Problem
    whole: Problem
    parallel: TensorParallel | None
    samples: int | None = None

    @property
    def words(self) -> str:
        """What its devices are, and the size of its microbatches where that was open."""
        size = "" if self.samples is None else f"{plural(self.samples, 'sample')} a microbatch, "
        if self.parallel is None:
            return f"{size}single devices"
        if len(self.parallel.degrees) == 1:
            return f"{size}groups of {self.parallel.degrees[0]}"
        counts = Counter(len(group.devices) for group in self.parallel.groups)
        return size + " and ".join(
            f"{plural(counts[size], 'group')} of {size}" for size in sorted(counts)
        )


def variants_of(problem: Problem) -> list[Variant]:
    """Return the problem with each size of microbatches and groups, single devices first.

    Args:
        problem: of single devices, or of groups that are devices already.

    Raises:
        PipeplanError: if the job's size of groups is not possible.
    """
    if not problem.job.microbatch_sizes:
        return _of_groups(problem)
    return [
        replace(variant, samples=row.job.samples_per_microbatch)
        for row in of_each_size(problem)
        for variant in _of_groups(row)
    ]


def _of_groups(problem: Problem) -> list[Variant]:
    degree = problem.job.tensor_parallel
    if degree == 1 or problem.has_groups:
        return [Variant(problem, problem, None)]
    if degree != "any":
        return [_of_size(problem, degree)]
    record, sequence = problem.graph.record, problem.job.sequence_parallel
    degrees = sorted(
        row.degree
        for row in record.splits
        if row.degree and row.regions and row.sequence == sequence
    )
    if not degrees:
        split_of(record, 2, sequence=sequence)  # Says what to do.
    single = replace(problem, job=problem.job.model_copy(update=WITHOUT_GROUPS))
    found = [Variant(single, problem, None), *_possible(problem, degrees)]
    sizes = [1 if row.parallel is None else row.parallel.degrees[0] for row in found]
    mixed = mixed_packings(problem, sizes)
    return [*found, *(Variant(grouped_problem(problem, row), problem, row) for row in mixed)]


def _possible(problem: Problem, degrees: list[int]) -> Iterator[Variant]:
    """Yield the sizes of which the cluster has groups."""
    for degree in degrees:
        try:
            packed(problem.cluster, degree)
        except PipeplanError:
            continue
        yield _of_size(problem, degree)


def _of_size(problem: Problem, degree: int) -> Variant:
    sequence = problem.job.sequence_parallel
    if not split_of(problem.graph.record, degree, sequence=sequence).regions:
        raise PipeplanError(
            f"tensor_parallel = {degree}: no part of {problem.graph.name!r} splits into {degree} "
            "equal shares (heads, columns, vocabulary or experts); choose another number"
        )
    parallel = TensorParallel(sequence=sequence, groups=tuple(packed(problem.cluster, degree)))
    return Variant(grouped_problem(problem, parallel), problem, parallel)
