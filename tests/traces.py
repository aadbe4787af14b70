"""Traces that tests share: each takes a second, and nothing changes a traced step."""

from planner.job import Job
from planner.model.layer_graph import LayerGraph
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
