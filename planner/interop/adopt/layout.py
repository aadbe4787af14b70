"""The whole layout of another runtime, in a plan's terms, and the plan of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import PipeplanError
from planner.interop.adopt.adopt import Adopted, adopted
from planner.interop.adopt.division import Division
from planner.interop.adopt.orders import Schedule
from planner.interop.importing.schedule_csv import ScheduleTable
from planner.job import GradientPrecision, Job, Precision
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.space import WITH_SHARDED_PARAMETERS
from planner.units import plural

Divide = Callable[[LayerGraph], Division]
"""The layers of every stage of a model."""
Table = Callable[[int, int], ScheduleTable | None]
"""The order of so many stages and microbatches of a pipeline; None: as the schedule's name says."""
Objections = Callable[[int], Iterator[str]]
"""Why plans cannot express a layout of so many pipelines."""


@dataclass(frozen=True)
class RuntimeLayout:
    """Stages, degrees and batch that a runtime was given in its own words.

    Attributes:
        source: the file that they are from, for messages.
        divide: finds the layers of every stage.
        names: the runtime's names of the tensor, pipeline and data degrees, and of the microbatch
            and global batch sizes, for messages.
        tensor_parallel: devices of a group; 1: single devices.
        sequence_parallel: whether a group shares values by positions.
        expert_parallel: whether its devices have whole experts.
        pipeline_size: ranks of a pipeline.
        replicas: data-parallel pipelines; None: as many as there are devices for.
        schedule: its name or table; None: 1F1B, interleaved where ranks hold several stages.
        table: gives the order where a name does not, or refuses the number of microbatches.
        blocks_messages: whether messages block where stages are interleaved.
        samples_per_microbatch: None: the job's.
        global_batch: samples of an iteration; None: not told.
        share: microbatches of each pipeline; None: not told.
        recompute_blocks: numbered blocks at the start of every stage that run again; None: all.
        recompute_attention: whether the core of attention runs again in every block.
        shard_optimizer: whether the pipelines share the optimizer's state, if there are several;
            None: the job's.
        shard_parameters: whether they divide weights and gradients too, if there are several;
            None: the job's.
        overlap_reduction: whether replicas reduce during the last backwards; None: the job's.
        precision: of computation; None: not told.
        gradient_precision: of sums of gradients, as in the job; None: not told.
        objections: to what is known only with the number of pipelines.
        notes: what is predicted otherwise than the runtime does it.
    """

    source: str
    divide: Divide
    names: LayoutNames
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False
    pipeline_size: int = 1
    replicas: int | None = None
    schedule: Schedule = None
    table: Table | None = None
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
    objections: Objections | None = None
    notes: tuple[str, ...] = ()

    def on(self, devices: int, replicas: int | None = None) -> RuntimeLayout:
        """Return the layout with its number of replicas.

        Args:
            devices: that there are; all of them run, unless the number of replicas is told.
            replicas: the number, where the runtime was not told.

        Raises:
            PipeplanError: if it was told another, if the devices are no multiple of a pipeline's,
                or if plans cannot express the layout then.
        """
        known = self.replicas if self.replicas is not None else replicas
        if replicas not in (None, known):
            raise PipeplanError(
                f"--replicas {replicas}: {self.source} says {self.names.data} {known}; leave "
                "--replicas out"
            )
        found = self._replicas_on(devices) if known is None else known
        problems = [*self.objections(found)] if self.objections else []
        if problems:
            raise PipeplanError(f"{self.source}: {problem}" for problem in problems)
        return replace(self, replicas=found)

    def _replicas_on(self, devices: int) -> int:
        each = self.tensor_parallel * self.pipeline_size
        if devices % each:
            raise PipeplanError(
                f"{self.source}: {self.names.tensor} {self.tensor_parallel} x {self.names.pipeline}"
                f" {self.pipeline_size} are {plural(each, 'device')}, of which the {devices} of "
                "the cluster are no multiple; give the number of data-parallel pipelines "
                "(--replicas)"
            )
        return devices // each

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
        samples = self.samples_per_microbatch or job.samples_per_microbatch
        fields: dict[str, Any] = {
            "samples_per_microbatch": samples,
            "microbatches": self._microbatches(job, samples),
            "tensor_parallel": self.tensor_parallel,
            "sequence_parallel": self.sequence_parallel,
            "recompute_attention": self.recompute_attention,
            "expert_parallel": self.expert_parallel,
        }
        if self.gradient_precision not in (None, job.gradient_precision or "float32"):
            fields["gradient_precision"] = self.gradient_precision
        if self.shard_optimizer is not None:
            fields["shard_optimizer"] = self.shard_optimizer and self.replicas > 1
        if self.shard_parameters is not None:
            fields["shard_parameters"] = self.shard_parameters and self.replicas > 1
            fields |= WITH_SHARDED_PARAMETERS if fields["shard_parameters"] else {}
        if self.overlap_reduction is not None and self.replicas > 1:
            fields["overlap_reduction"] = self.overlap_reduction
        return fields

    def _microbatches(self, job: Job, samples: int) -> int:
        replicas = self.replicas or 1
        if self.share is not None:
            found = self.share * replicas
        elif self.global_batch is not None:
            found, rest = divmod(self.global_batch, samples)
            if rest or not found:
                raise PipeplanError(
                    f"{self.source}: {self.names.batch} {self.global_batch} is no multiple of "
                    f"{self.names.microbatch} {samples}; correct one of them"
                )
        else:
            found = job.microbatches
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
            devices: in the order of ranks; the cluster's if not told.

        Raises:
            PipeplanError: naming what does not fit the model or the cluster.
        """
        assert self.replicas is not None  # Known since `on`.
        division = self.divide(problem.graph)
        held = max(-(-len(division) // self.pipeline_size), problem.job.max_stages_per_device)
        job = problem.job.model_copy(update={"max_stages_per_device": held})
        share = job.microbatches // self.replicas
        table = self.table and self.table(len(division), share)
        return adopted(
            replace(problem, job=job),
            division,
            schedule=table or self.schedule,
            pipeline_size=self.pipeline_size,
            replicas=self.replicas,
            devices=devices,
            recompute_blocks=self.recompute_blocks,
        )


@dataclass(frozen=True)
class LayoutNames:
    """What a runtime calls the figures of a layout.

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
