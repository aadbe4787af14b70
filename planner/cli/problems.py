"""Problems, jobs and graphs as a command line names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PipeplanError

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster
    from planner.job import Job
    from planner.model.layer_graph import LayerGraph
    from planner.plan.problem import Problem
    from planner.plan.runtime_rules import RuntimeRules


@dataclass(frozen=True)
class LoadedProblem:
    """The problem of a command line, and what tracing its model found.

    Attributes:
        problem: to be solved.
        text_problem: why the executor's text cannot train the model; None: it can.
        compared: how its step compares with eager autograd; None: not known.
    """

    problem: Problem
    text_problem: str | None
    compared: str | None = None


@dataclass(frozen=True)
class ProblemFiles:
    """What a command line names a problem by.

    Attributes:
        model: ``module:factory``, ``hf:…`` or a ``graph.json``.
        cluster: its file.
        job: its file; None: the default job.
        settings: of the job and of the model, as NAME=VALUE.
        costs: files of measured times: profiles, or calibrated graphs of the same model.
        runtime: name or file of what will train; by default the job's.
        memory_margin: memory to leave free on every device, beside what is reserved.
    """

    model: str
    cluster: Path
    job: Path | None = None
    settings: Sequence[str] = ()
    costs: Sequence[Path] = ()
    runtime: str | None = None
    memory_margin: str | None = None

    @property
    def inputs(self) -> list[Path]:
        """The files that the problem is made from."""
        others = (self.job, self.runtime and Path(self.runtime))
        return [Path(self.model), self.cluster, *self.costs, *(path for path in others if path)]

    @property
    def words(self) -> list[str]:
        """The same as words of a command line."""
        options: list[tuple[str, Any]] = [("cluster", self.cluster), ("job", self.job)]
        options += [("set", text) for text in self.settings]
        options += [("costs", path) for path in self.costs]
        options += [("runtime", self.runtime), ("memory-margin", self.memory_margin)]
        given = [(f"--{name}", str(value)) for name, value in options if value is not None]
        return [self.model, *(word for option in given for word in option)]

    def loaded_job(self) -> Job:
        """Return the job of the file, or the default job, with the settings."""
        return job_of(self.job, self.settings)

    def load(
        self, *, check: bool = False, fields: Mapping[str, Any] | None = None, source: str = ""
    ) -> LoadedProblem:
        """Load the problem; files that are quick to read come first.

        Args:
            check: whether the traced step is compared with eager autograd.
            fields: further fields of the job.
            source: what gave them, for messages.

        Raises:
            PipeplanError: for a wrong file or setting, or if they do not fit together.
        """
        from planner.cluster.cluster import Cluster
        from planner.cluster.memory_margin import with_memory_margin
        from planner.plan.problem import Problem
        from planner.plan.runtimes import for_runtime

        job = self.loaded_job()
        if fields:
            job = type(job).parse({**job.model_dump(mode="json"), **fields}, source)
        rules = given_rules(self.runtime)
        cluster = Cluster.load(self.cluster)
        if self.memory_margin is not None:
            cluster = with_memory_margin(cluster, self.memory_margin)
        require_no_arguments(self.model, self.settings)
        costs, label = read_all_costs(self.costs), str(self.cluster)
        degrees = degrees_to_trace(job, cluster)
        graph, text_problem, compared = traced(self.model, job, degrees, check=check)
        graphs, clusters = with_measured_costs([graph], {label: cluster}, job, costs)
        problem = Problem(graphs[0], clusters[label], job, source_of(self.model, job))
        problem = for_runtime(problem, rules)
        problem.require_known_devices()
        return LoadedProblem(problem, text_problem, compared)


def read_all_costs(paths: Sequence[Path]) -> list[Any]:
    """Return the measured costs of the files of ``--costs``.

    Raises:
        PipeplanError: if one of them cannot be read.
    """
    from planner.interop.measured_costs import read_costs

    return [read_costs(path, "--costs") for path in paths]


def with_measured_costs(
    graphs: Sequence[LayerGraph], clusters: Mapping[str, Cluster], job: Job, costs: Sequence[Any]
) -> tuple[list[LayerGraph], dict[str, Cluster]]:
    """Return graphs with the measured times of all clusters' types, and clusters with theirs.

    A note names types that have no times while others have some.

    Args:
        graphs: the model at each size of a microbatch.
        clusters: by what they are called in the note.
        job: whose optimizer was measured.
        costs: see :func:`read_all_costs`.
    """
    from planner.interop.measured_costs import (
        warn_of_types_without_costs,
        with_costs,
        with_optimizer_costs,
    )

    timed, fitted = list(graphs), dict(clusters)
    types = {name: kind for c in clusters.values() for name, kind in c.device_types.items()}
    every = next(iter(clusters.values())).model_copy(update={"device_types": types})
    for file in costs:
        timed = [with_costs(graph, every, file) for graph in timed]
        fitted = {name: with_optimizer_costs(one, job, file) for name, one in fitted.items()}
    for label, one in fitted.items():
        warn_of_types_without_costs(timed[0], one, label)
    return timed, fitted


def source_of(model: str, job: Job) -> Any:
    """Return what the executor builds the model from, which a layer graph does not say."""
    from planner.plan.problem import ModelSource

    return ModelSource(None if is_graph_file(model) else model, dict(job.model_arguments))


def require_no_arguments(model: str, settings: Sequence[str]) -> None:
    """Refuse model arguments for a graph that was traced before.

    Raises:
        PipeplanError: naming the setting.
    """
    from planner.job import Job

    for text in settings if is_graph_file(model) else ():
        if text.partition("=")[0] not in Job.model_fields:
            raise PipeplanError(
                f"--set {text}: {model} is a traced graph, so model arguments have no effect; "
                "trace the model again with it"
            )


def job_of(path: Path | None, settings: Sequence[str] | None) -> Job:
    """Return the job of a file or the default job, with what ``--set`` says.

    Raises:
        PipeplanError: for a wrong file or setting.
    """
    from planner.job import Job, job_with

    return job_with(Job() if path is None else Job.load(path), settings or [])


def degrees_to_trace(job: Job, cluster: Cluster) -> tuple[int, ...]:
    """Return the sizes of tensor-parallel groups for which a job needs the model's split.

    Any size stands for the powers of two up to 16, as far as the cluster has as many devices of one
    type.
    """
    if job.tensor_parallel != "any":
        return () if job.tensor_parallel == 1 else (job.tensor_parallel,)
    most = max(Counter(device.type for device in cluster.devices).values())
    return tuple(degree for degree in (2, 4, 8, 16) if degree <= most)


def given_rules(runtime: str | None) -> RuntimeRules | None:
    """Return the rules of ``--runtime``; None if that was not given.

    Raises:
        PipeplanError: if there is no such runtime, or its file is wrong.
    """
    from planner.plan.runtimes import rules_of

    return None if runtime is None else rules_of(runtime)


def is_graph_file(model: str) -> bool:
    """Return whether MODEL is a layer graph file; ``hf:CONFIG.json`` is a model to trace."""
    return model.endswith(".json") and not model.startswith("hf:")


def traced(
    model: str, job: Job, degrees: Sequence[int] = (), *, check: bool = False
) -> tuple[LayerGraph, str | None, str | None]:
    """Return the layer graph of a model (traced) or of a ``graph.json`` (read).

    Args:
        model: as the command line names it.
        job: whose microbatches.
        degrees: sizes of tensor-parallel groups for which a traced graph has splits.
        check: whether a traced step is compared with eager autograd.

    Returns:
        The graph, why text cannot train the model, and how its step compares; None: not known.

    Raises:
        PipeplanError: if there is none, if the model cannot be traced, or if the step differs.
    """
    from planner.model.layer_graph import LayerGraph

    if is_graph_file(model):
        return LayerGraph.load(model), None, None
    if ":" not in model:
        raise PipeplanError(
            f"MODEL {model!r}: expected module:factory, for example models.gpt:gpt2_small, "
            "hf:ClassName or hf:CONFIG.json for a model of Hugging Face transformers, "
            "or a graph.json written by `pipeplan trace`"
        )
    from planner.tracing.check import compare_with_eager
    from planner.tracing.factory import import_factory, import_loss
    from planner.tracing.lookups import text_problem_of_step
    from planner.tracing.trace import trace_step

    step = trace_step(model, job)
    record = step.graph
    if degrees:
        from planner.tracing.sharding.record import degrees_with_experts, routing_of, with_splits

        if job.expert_parallel and job.tensor_parallel == "any":
            degrees = degrees_with_experts(step.exported, degrees)
        experts = routing_of(job)
        record = with_splits(step, degrees, sequence=job.sequence_parallel, experts=experts)
    compared = None
    if check:
        compared = compare_with_eager(import_factory(model), job, record, import_loss(job))
    return LayerGraph.from_record(record), text_problem_of_step(step.exported, job), compared
