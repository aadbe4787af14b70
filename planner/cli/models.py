"""The problem (model, job, cluster, costs) that a command line names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PipeplanError, shorten

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster
    from planner.job import Job
    from planner.model.layer_graph import LayerGraph
    from planner.plan.problem import Problem
    from planner.plan.runtime_rules import RuntimeRules


@dataclass(frozen=True)
class ProblemRequest:
    """The problem as named on a command line; None where an option was not given.

    Attributes:
        model: ``module:factory`` or a ``graph.json``.
        cluster: its file.
        job: its file.
        settings: model arguments as NAME=VALUE.
        costs: files of measured times: profiles, or a calibrated graph of the same model.
        runtime: name or file of what will train; by default the job's.
        tensor_parallel: devices of a group, a number or ``any``; by default the job's.
        sequence_parallel: whether its devices share values by positions, beside the job's.
        expert_parallel: whether its devices have whole experts, beside the job's.
        epoch_samples: samples of the data set; by default the job's.
        shard_optimizer: whether replicas share the optimizer's state, beside the job's.
        shard_parameters: whether they divide weights and gradients as well.
        check: whether the traced step is compared with eager autograd.
        memory_margin: memory to leave free on every device, beside what is reserved.
        fields: further fields of the job, in place of its file's.
        source: where these are from, for messages.
    """

    model: str
    cluster: Path
    job: Path | None = None
    settings: tuple[str, ...] = ()
    costs: tuple[Path, ...] = ()
    runtime: str | None = None
    tensor_parallel: str | None = None
    sequence_parallel: bool = False
    epoch_samples: int | None = None
    shard_optimizer: bool = False
    expert_parallel: bool = False
    shard_parameters: bool = False
    check: bool = False
    memory_margin: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    source: str = "--tensor-parallel"

    @property
    def inputs(self) -> list[Path]:
        """The files that the problem is made from."""
        job = [] if self.job is None else [self.job]
        runtime = [] if self.runtime is None else [Path(self.runtime)]
        return [Path(self.model), self.cluster, *job, *self.costs, *runtime]

    @property
    def words(self) -> list[str]:
        """The same problem as command-line words."""
        options = ("job", "runtime", "tensor_parallel", "epoch_samples", "memory_margin")
        flags = ("sequence_parallel", "expert_parallel", "shard_optimizer", "shard_parameters")
        given = [(name, getattr(self, name)) for name in options]
        given += [("set", setting) for setting in self.settings]
        given += [("costs", path) for path in self.costs]
        found = [self.model, "--cluster", str(self.cluster)]
        for name, value in given:
            found += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        return found + [f"--{name.replace('_', '-')}" for name in flags if getattr(self, name)]


@dataclass(frozen=True)
class LoadedProblem:
    """The problem of a command line, and why text data cannot train its model.

    Attributes:
        problem: to be solved.
        text_problem: why the executor's text cannot train the model; None: it can.
        compared: how its step compares with eager autograd; None: not known.
    """

    problem: Problem
    text_problem: str | None
    compared: str | None = None


def loaded_problem(request: ProblemRequest) -> LoadedProblem:
    """Load the problem of a command line; files that are quick to read come first.

    Args:
        request: the problem as named on the command line.

    Raises:
        PipeplanError: for a wrong file or setting, or if the three do not fit together.
    """
    from planner.cluster.cluster import Cluster
    from planner.cluster.memory_margin import with_memory_margin
    from planner.interop.calibrate.costs import (
        read_costs,
        warn_of_types_without_costs,
        with_costs,
        with_optimizer_costs,
    )
    from planner.plan.problem import ModelSource, Problem
    from planner.plan.runtimes import for_runtime

    job = with_epoch(_grouped_job(request), request.epoch_samples)
    rules = given_rules(request.runtime)
    cluster = Cluster.load(request.cluster)
    if request.memory_margin is not None:
        cluster = with_memory_margin(cluster, request.memory_margin)
    factory = None if is_graph_file(request.model) else request.model
    if factory is None and request.settings:
        raise PipeplanError(
            f"--set {request.settings[0]}: {request.model} is a traced graph, so model arguments "
            "have no effect; trace the model again with it"
        )
    source = ModelSource(factory, dict(job.model_arguments))
    every_costs = [read_costs(path, "--costs") for path in request.costs]
    degrees = degrees_to_trace(job, cluster)
    graph, text_problem, compared = traced(request.model, job, degrees, check=request.check)
    for costs in every_costs:
        graph = with_costs(graph, cluster, costs)
        cluster = with_optimizer_costs(cluster, job, costs)
    warn_of_types_without_costs(graph, cluster, str(request.cluster))
    problem = for_runtime(Problem(graph, cluster, job, source), rules)
    problem.require_known_devices()
    return LoadedProblem(problem, text_problem, compared)


def _grouped_job(request: ProblemRequest) -> Job:
    """Return the job with the groups and other fields that the command line wants."""
    from planner.space import WITH_SHARDED_PARAMETERS

    job, fields = job_of(request.job, request.settings), dict(request.fields)
    if request.shard_optimizer:
        fields["shard_optimizer"] = True
    if request.shard_parameters:
        fields |= {"shard_parameters": True, **WITH_SHARDED_PARAMETERS}
    if fields:
        job = type(job).parse({**job.model_dump(mode="json"), **fields}, request.source)
    return with_groups(
        job,
        request.tensor_parallel,
        sequence_parallel=request.sequence_parallel,
        expert_parallel=request.expert_parallel,
    )


def with_groups(
    job: Job, degree: str | None, *, sequence_parallel: bool, expert_parallel: bool
) -> Job:
    """Return a job with the groups that a command line wants.

    Args:
        job: whose own hold where the command line does not say.
        degree: devices of a group, a number or ``any``; None: the job's.
        sequence_parallel: whether to share values by positions, if the job does not say so.
        expert_parallel: whether to give out whole experts, if the job does not say so.

    Raises:
        PipeplanError: if there are no such groups.
    """
    fields: dict[str, Any] = {}
    if degree is not None:
        if degree != "any" and not (degree.isdecimal() and int(degree) > 0):
            raise PipeplanError(
                f"--tensor-parallel: {shorten(degree)}; give the number of devices of a group, "
                "a whole number from 1, or any"
            )
        fields["tensor_parallel"] = degree if degree == "any" else int(degree)
    if sequence_parallel:
        fields["sequence_parallel"] = True
    if expert_parallel:
        fields["expert_parallel"] = True
    if not fields:
        return job
    return type(job).parse({**job.model_dump(mode="json"), **fields}, "--tensor-parallel")


def degrees_to_trace(job: Job, cluster: Cluster) -> tuple[int, ...]:
    """Return the sizes of tensor-parallel groups for which a job needs the model's split.

    Any size stands for the powers of two up to 16, as far as the cluster has as many devices of one
    type.
    """
    if job.tensor_parallel != "any":
        return () if job.tensor_parallel == 1 else (job.tensor_parallel,)
    most = max(Counter(device.type for device in cluster.devices).values())
    return tuple(degree for degree in (2, 4, 8, 16) if degree <= most)


def job_of(path: Path | None, settings: Sequence[str] | None) -> Job:
    """Return the job of a file or the default job, with ``--set`` overriding its model arguments.

    Raises:
        PipeplanError: for a wrong file or setting.
    """
    from planner.job import Job, job_with

    return job_with(Job() if path is None else Job.load(path), settings or [])


def with_epoch(job: Job, epoch_samples: int | None) -> Job:
    """Return a job with the size of the data set that a command line names, if it names one."""
    if epoch_samples is None:
        return job
    return job.model_copy(update={"epoch_samples": epoch_samples})


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


def graph_of(model: str, job: Job, degrees: Sequence[int] = ()) -> LayerGraph:
    """Return the layer graph of a model (traced) or of a ``graph.json`` (read).

    Args:
        model: as the command line names it.
        job: whose microbatches.
        degrees: sizes of tensor-parallel groups for which a traced graph has splits.

    Raises:
        PipeplanError: if there is none, or the model cannot be traced.
    """
    return traced(model, job, degrees)[0]


def traced(
    model: str, job: Job, degrees: Sequence[int] = (), *, check: bool = False
) -> tuple[LayerGraph, str | None, str | None]:
    """Return the graph of :func:`graph_of`, and notes on text data and on the step, if any.

    With ``check`` a traced step is compared with eager autograd.

    Raises:
        PipeplanError: as :func:`graph_of`, or if the step differs.
    """
    from planner.model.layer_graph import LayerGraph

    if is_graph_file(model):
        return LayerGraph.load(model), None, None
    if ":" not in model:
        raise PipeplanError(
            f"MODEL {model!r}: expected module:factory, for example models.gpt:gpt2_small, "
            "hf:ClassName or hf:CONFIG.json for a model of Hugging Face transformers, "
            "or a graph.json written by `pipeplan trace` or `pipeplan import`"
        )
    from planner.tracing.check import compare_with_eager
    from planner.tracing.factory import import_factory, import_loss
    from planner.tracing.lookups import text_problem_of_step
    from planner.tracing.trace import trace_step

    step = trace_step(model, job)
    record = step.graph
    if degrees:
        from planner.tracing.sharding.record import with_splits
        from planner.tracing.sharding.routing import degrees_with_experts, routing_of

        if job.expert_parallel and job.tensor_parallel == "any":
            degrees = degrees_with_experts(step.exported, degrees)
        experts = routing_of(job)
        record = with_splits(step, degrees, sequence=job.sequence_parallel, experts=experts)
    compared = None
    if check:
        compared = compare_with_eager(import_factory(model), job, record, import_loss(job))
    return LayerGraph.from_record(record), text_problem_of_step(step.exported, job), compared
