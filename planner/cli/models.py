"""The model and the job that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.artifacts.job import Job
    from planner.artifacts.layer_graph import LayerGraph
    from planner.artifacts.problem import Problem


@dataclass(frozen=True)
class Asked:
    """The problem that a command line tells; None where an option was not given.

    Attributes:
        model: ``module:factory`` or a ``graph.json``.
        cluster: its file.
        job: its file.
        settings: model arguments as NAME=VALUE.
        costs: files of measured times: profiles, or a calibrated graph of the same model.
    """

    model: str
    cluster: Path
    job: Path | None = None
    settings: tuple[str, ...] = ()
    costs: tuple[Path, ...] = ()

    @property
    def inputs(self) -> list[Path]:
        """Files that it is made from."""
        job = [] if self.job is None else [self.job]
        return [Path(self.model), self.cluster, *job, *self.costs]

    @property
    def words(self) -> list[str]:
        """The same on a command line again."""
        found = [self.model, "--cluster", str(self.cluster)]
        found += [] if self.job is None else ["--job", str(self.job)]
        for setting in self.settings:
            found += ["--set", setting]
        for path in self.costs:
            found += ["--costs", str(path)]
        return found


@dataclass(frozen=True)
class Told:
    """The problem of a command line, and what only its model can tell.

    Attributes:
        problem: to be solved.
        text_problem: why the executor's text cannot train the model; None where nothing speaks
            against it.
    """

    problem: Problem
    text_problem: str | None


def problem_of(asked: Asked) -> Problem:
    """The problem of a command line, as :func:`told_problem` reads it."""
    return told_problem(asked).problem


def told_problem(asked: Asked) -> Told:
    """What a command line tells; everything that is quick to read is read first.

    Args:
        asked: what the command line tells.

    Raises:
        PipeplanError: for a wrong file or setting, or if the three do not fit together.
    """
    from planner.artifacts.cluster import Cluster
    from planner.artifacts.problem import ModelSource, Problem
    from planner.calibration.costs import with_costs

    job = job_of(asked.job, asked.settings)
    cluster = Cluster.load(asked.cluster)
    factory = None if is_graph_file(asked.model) else asked.model
    if factory is None and asked.settings:
        raise PipeplanError(
            f"--set {asked.settings[0]}: {asked.model} was traced already; trace the model again "
            "with it"
        )
    source = ModelSource(factory, dict(job.model_arguments))
    graph, text_problem = _traced(asked.model, job)
    for path in asked.costs:
        graph = with_costs(graph, cluster, path, "--costs")
    return Told(Problem(graph, cluster, job, source), text_problem)


def job_of(path: Path | None, settings: Sequence[str] | None) -> Job:
    """The job of a file, or the default one, with the model arguments of ``--set`` over its own.

    Raises:
        PipeplanError: for a wrong file or setting.
    """
    from planner.artifacts.job import Job, job_with

    return job_with(Job() if path is None else Job.load(path), settings or [])


def is_graph_file(model: str) -> bool:
    """Whether MODEL is a layer graph to read; ``hf:CONFIG.json`` is a model to trace."""
    return model.endswith(".json") and not model.startswith("hf:")


def graph_of(model: str, job: Job) -> LayerGraph:
    """The layer graph of a model, traced, or of a ``graph.json``, read.

    Raises:
        PipeplanError: if there is none, or the model cannot be traced.
    """
    return _traced(model, job)[0]


def _traced(model: str, job: Job) -> tuple[LayerGraph, str | None]:
    """The layer graph, and why text cannot train the model, if that is known."""
    from planner.artifacts.layer_graph import LayerGraph

    if is_graph_file(model):
        return LayerGraph.load(model), None
    if ":" not in model:
        raise PipeplanError(
            f"MODEL {model!r}: expected module:factory, for example models.gpt:gpt2_small, "
            "hf:ClassName or hf:CONFIG.json for a model of Hugging Face transformers, "
            "or a graph.json written by `pipeplan trace` or `pipeplan import`"
        )
    from planner.tracing.lookups import text_problem_of_step
    from planner.tracing.trace import trace_step

    step = trace_step(model, job)
    return LayerGraph.from_record(step.graph), text_problem_of_step(step.exported, job)
