"""The whole layout of another runtime, in a plan's terms, and the plan of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from planner.errors import PipeplanError
from planner.interop.adopted import Adopted, Schedule, adopted
from planner.interop.division import Division
from planner.interop.torch_pipelining import ScheduleTable
from planner.job import GradientPrecision, Job, Precision
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.space import WITH_SHARDED_PARAMETERS
from planner.units import plural


class LayoutNames(NamedTuple):
    """A runtime's names of the figures of a layout, for messages.

    Attributes:
        tensor: devices of a tensor-parallel group.
        pipeline: ranks of a pipeline.
        data: data-parallel pipelines.
        microbatch: samples of a microbatch.
        batch: samples of an iteration.
    """

    tensor: str
    pipeline: str
    data: str
    microbatch: str
    batch: str


@dataclass(frozen=True)
class RuntimeLayout:
    """Stages, degrees and batch that a runtime was given in its own words.

    Attributes:
        source: the file that they are from, for messages.
        names: the runtime's names of its figures.
        divide: returns the layers of every stage of a model.
        table: returns the order of so many stages and microbatches of a pipeline, None where it is
            that of the schedule's name; raises PipeplanError if the runtime refuses them.
        objections: yields why plans cannot express a layout of so many pipelines.
        tensor_parallel: devices of a group; 1: single devices.
        sequence_parallel: whether a group shares values by positions.
        expert_parallel: whether its devices have whole experts.
        pipeline_size: ranks of a pipeline.
        replicas: data-parallel pipelines; None: as many as there are devices for.
        schedule: its name or table; None: 1F1B, interleaved where ranks hold several stages.
        blocks_messages: whether messages block where stages are interleaved.
        samples_per_microbatch: None: the job's.
        global_batch: samples of an iteration; None: not given.
        share: microbatches of each pipeline; None: not given.
        recompute_blocks: numbered blocks at the start of every stage that run again; None: all.
        recompute_attention: whether the core of attention runs again in every block.
        shard_optimizer: whether the pipelines share the optimizer's state, if there are several;
            None: the job's.
        shard_parameters: whether they divide weights and gradients too, if there are several;
            None: the job's.
        overlap_reduction: whether replicas reduce during the last backwards; None: the job's.
        precision: of computation; None: not given.
        gradient_precision: of sums of gradients, as in the job; None: not given.
        notes: what is predicted otherwise than the runtime does it.
    """

    source: str
    names: LayoutNames
    divide: Callable[[LayerGraph], Division]
    table: Callable[[int, int], ScheduleTable | None] | None = None
    objections: Callable[[int], Iterator[str]] | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False
    pipeline_size: int = 1
    replicas: int | None = None
    schedule: Schedule = None
    blocks_messages: bool = False
    samples_per_microbatch: int | None = None
    global_batch: int | None = None
    share: int | None = None
    recompute_blocks: int | None = 0
    recompute_attention: bool = False
    shard_optimizer: bool | None = None
    shard_parameters: bool | None = None
    overlap_reduction: bool | None = None
    precision: Precision | None = None
    gradient_precision: GradientPrecision | None = None
    notes: tuple[str, ...] = ()

    def on(self, devices: int, replicas: int | None = None) -> RuntimeLayout:
        """Return the layout with its number of replicas.

        Args:
            devices: number of devices; all of them run, unless the number of replicas is given.
            replicas: the number, where the runtime's arguments leave it open.

        Raises:
            PipeplanError: if the arguments give another, if the devices are no multiple of a
                pipeline's, or if plans cannot express the layout then.
        """
        found = self.replicas if self.replicas is not None else replicas
        if replicas not in (None, found):
            raise PipeplanError(
                f"--replicas {replicas}: {self.source} says {self.names.data} {found}; leave "
                "--replicas out"
            )
        if found is None:
            each = self.tensor_parallel * self.pipeline_size
            found, rest = divmod(devices, each)
            if rest:
                raise PipeplanError(
                    f"{self.source}: {self.names.tensor} {self.tensor_parallel} x "
                    f"{self.names.pipeline} {self.pipeline_size} are {plural(each, 'device')}, of "
                    f"which the {devices} of the cluster are no multiple; give the number of "
                    "data-parallel pipelines (--replicas)"
                )
        problems = list(self.objections(found)) if self.objections else []
        if problems:
            raise PipeplanError(f"{self.source}: {problem}" for problem in problems)
        return replace(self, replicas=found)

    def job_fields(self, job: Job) -> dict[str, Any]:
        """Return the fields of a job in which it says what the layout does.

        Args:
            job: that leaves open what the layout does not say.

        Raises:
            PipeplanError: if the batch cannot be divided so, or the job's precision is another.
        """
        assert self.replicas is not None  # Known since `on`.
        if self.precision not in (None, job.precision):
            raise PipeplanError(
                f"{self.source}: it trains in {self.precision}, but the job says precision = "
                f'"{job.precision}"; set precision = "{self.precision}" in the job file'
            )
        several, samples = self.replicas > 1, self.samples_per_microbatch
        fields: dict[str, Any] = {
            "samples_per_microbatch": samples or job.samples_per_microbatch,
            "microbatches": self._microbatches(job, samples or job.samples_per_microbatch),
            "tensor_parallel": self.tensor_parallel,
            "sequence_parallel": self.sequence_parallel,
            "recompute_attention": self.recompute_attention,
            "expert_parallel": self.expert_parallel,
        }
        if self.gradient_precision not in (None, job.gradient_precision or "float32"):
            fields["gradient_precision"] = self.gradient_precision
        if self.shard_optimizer is not None:
            fields["shard_optimizer"] = self.shard_optimizer and several
        if self.shard_parameters is not None:
            fields["shard_parameters"] = self.shard_parameters and several
            fields |= WITH_SHARDED_PARAMETERS if fields["shard_parameters"] else {}
        if self.overlap_reduction is not None and several:
            fields["overlap_reduction"] = self.overlap_reduction
        return fields

    def _microbatches(self, job: Job, samples: int) -> int:
        replicas, found = self.replicas or 1, job.microbatches
        if self.share is not None:
            found = self.share * replicas
        elif self.global_batch is not None:
            found, rest = divmod(self.global_batch, samples)
            if rest or not found:
                raise PipeplanError(
                    f"{self.source}: {self.names.batch} {self.global_batch} is no multiple of "
                    f"{self.names.microbatch} {samples}; correct one of them"
                )
        if found % replicas:
            raise PipeplanError(
                f"{self.source}: {plural(found, 'microbatch', 'es')} of {samples} cannot be shared "
                f"out equally among {plural(replicas, 'pipeline')}; make {self.names.batch} a "
                f"multiple of {samples * replicas}"
            )
        return found

    def adopted(self, problem: Problem, devices: Sequence[str] | None = None) -> Adopted:
        """Return the plan of the layout, with its parts.

        Args:
            problem: of a job with :meth:`job_fields`.
            devices: in the order of ranks; by default the cluster's.

        Raises:
            PipeplanError: naming what does not fit the model or the cluster.
        """
        assert self.replicas is not None  # Known since `on`.
        division = self.divide(problem.graph)
        held = max(-(-len(division) // self.pipeline_size), problem.job.max_stages_per_device)
        job = problem.job.model_copy(update={"max_stages_per_device": held})
        share = job.microbatches // self.replicas
        table = self.table(len(division), share) if self.table else None
        return adopted(
            replace(problem, job=job),
            division,
            schedule=table or self.schedule,
            pipeline_size=self.pipeline_size,
            replicas=self.replicas,
            devices=devices,
            recompute_blocks=self.recompute_blocks,
        )
