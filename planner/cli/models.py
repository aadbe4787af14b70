"""The model and the job that a command line names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.job import Job
    from planner.artifacts.layer_graph import LayerGraph
    from planner.artifacts.problem import Problem


def problem_of(
    model: str,
    cluster: Path,
    job: Path | None,
    settings: list[str] | None,
    costs: Path | None = None,
) -> Problem:
    """The problem of a command line; everything that is quick to read is read first.

    Args:
        model: ``module:factory`` or a ``graph.json``.
        cluster: its file.
        job: its file.
        settings: model arguments as NAME=VALUE.
        costs: a calibrated graph of the same model, for its measured times.

    Raises:
        PipeplanError: for a wrong file or setting, or if the three do not fit together.
    """
    from planner.artifacts.cluster import Cluster
    from planner.artifacts.layer_graph import LayerGraph
    from planner.artifacts.problem import ModelSource, Problem
    from planner.calibration.costs import with_measured_times

    the_job = job_of(job, settings)
    the_cluster = Cluster.load(cluster)
    factory = None if is_graph_file(model) else model
    if factory is None and settings:
        raise PipeplanError(
            f"--set {settings[0]}: {model} was traced already; trace the model again with it"
        )
    source = ModelSource(factory, dict(the_job.model_arguments))
    measured = None if costs is None else LayerGraph.load(costs)
    graph = graph_of(model, the_job)
    if measured is not None:
        graph = with_measured_times(graph, measured, f"--costs {costs}")
    return Problem(graph, the_cluster, the_job, source)


def job_of(path: Path | None, settings: list[str] | None) -> Job:
    """The job of a file, or the default one, with the model arguments of ``--set`` over its own.

    Raises:
        PipeplanError: for a wrong file or setting.
    """
    from planner.artifacts.job import Job

    job = Job() if path is None else Job.load(path)
    if not settings:
        return job
    arguments = {**job.model_arguments, **dict(map(_setting, settings))}
    return job.model_copy(update={"model_arguments": arguments})


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise PipeplanError(f"--set {text}: expected NAME=VALUE, for example --set layers=12")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def is_graph_file(model: str) -> bool:
    """Whether MODEL is a layer graph to read; ``hf:CONFIG.json`` is a model to trace."""
    return model.endswith(".json") and not model.startswith("hf:")


def graph_of(model: str, job: Job) -> LayerGraph:
    """The layer graph of a model, traced, or of a ``graph.json``, read.

    Raises:
        PipeplanError: if there is none, or the model cannot be traced.
    """
    from planner.artifacts.layer_graph import LayerGraph

    if is_graph_file(model):
        return LayerGraph.load(model)
    if ":" not in model:
        raise PipeplanError(
            f"MODEL {model!r}: expected module:factory, for example models.gpt:gpt2_small, "
            "hf:ClassName or hf:CONFIG.json for a model of Hugging Face transformers, "
            "or a graph.json written by `pipeplan trace` or `pipeplan import`"
        )
    from planner.tracing.trace import trace

    return trace(model, job)
