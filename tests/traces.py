"""Traces that tests share: each takes a second, and nothing changes a traced step."""

from builders import star

from planner import Problem
from planner.cluster.group_packing import packed
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.tensor_parallel import TensorParallel, grouped_problem
from planner.tracing.sharding.record import routing_of, with_splits
from planner.tracing.trace import Factory, TracedStep, trace_step

_traced: dict[tuple[str | Factory, str, str | None], TracedStep] = {}


def step_once(model: str | Factory, job: Job, name: str | None = None) -> TracedStep:
    """Return what :func:`trace_step` does; of a model and job that were traced before, the same."""
    key = model, job.model_dump_json(), name
    if key not in _traced:
        _traced[key] = trace_step(model, job, name)
    return _traced[key]


def trace_once(model: str | Factory, job: Job) -> LayerGraph:
    """Return what :func:`~planner.tracing.trace.trace` does, as :func:`step_once`."""
    return LayerGraph.from_record(step_once(model, job).graph)


def in_groups(step: TracedStep, job: Job) -> Problem:
    """Return the problem of a step on four devices in the job's tensor-parallel groups."""
    degree, sequence = job.tensor_parallel, job.sequence_parallel
    assert isinstance(degree, int)
    record = with_splits(step, [degree], sequence=sequence, experts=routing_of(job))
    single = Problem(LayerGraph.from_record(record), star(4), job)
    groups = packed(single.cluster, degree)
    return grouped_problem(single, TensorParallel(degree=degree, sequence=sequence, groups=groups))
