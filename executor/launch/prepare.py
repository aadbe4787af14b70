"""Everything that can be done, and refused, before any rank talks to another."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from executor.distributed.host_tuning import return_freed_memory
from executor.distributed.member_group import member_shares
from executor.launch.check import compare_stages
from executor.launch.model import (
    Factory,
    PlannedModel,
    allowed_factory,
    allowed_loss,
    build_model,
)
from executor.launch.partial_model import Needed
from executor.launch.run import PlanRank
from executor.runtime.lowering import lower
from executor.runtime.member_messages import MemberMessages
from executor.split.attention import cores_of
from executor.split.in_place_writes import require_order
from executor.split.member_step import MemberStep, ParameterShares, member_step
from executor.split.model_split import cut, cut_for_member, messages_by_size
from executor.split.stage_module import StageModule
from executor.stage.gradient_types import set_gradient_types
from executor.sync.shared_parameters import ParameterOwners, planned_split
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.programs import Action
from planner.tracing.export import ExportedStep
from planner.tracing.factory import Loss
from planner.tracing.layers import LayerAssignment
from planner.tracing.lookups import Lookup, lookups
from planner.tracing.sharing import require_no_writes
from planner.tracing.torch_private import require_supported
from planner.verification import require_valid

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """This rank's part of a plan, ready to run.

    Attributes:
        plan: verified.
        place: of this process.
        device: of its tensors.
        model: the whole model, of which only the stages' tensors keep their data.
        stages: this rank's.
        program: its lowered program.
        parameters: those this rank holds, by the model's own names (FQNs), in order of name.
        seed: of the training's random numbers.
        autocast: what torch's autocast lowers operations to.
        unused: parameters that no layer uses, by name; they keep theirs on the first rank.
        lookups: limits on the values of a batch's entries.
        shorter: the same stages for microbatches of each length but the longest, ascending; empty
            if all are equal.
        messages: what this rank sends to members of tensor-parallel groups of other sizes; None
            where all have one size.
        evaluation: the stages in evaluation mode, on the same tensors; empty if not asked for.
    """

    plan: Plan
    place: PlanRank
    device: torch.device
    model: nn.Module
    stages: tuple[StageModule, ...]
    program: tuple[Action, ...]
    parameters: dict[str, nn.Parameter]
    seed: int = 0
    autocast: torch.dtype | None = None
    unused: dict[str, nn.Parameter] = field(default_factory=dict)
    lookups: tuple[Lookup, ...] = ()
    shorter: tuple[tuple[StageModule, ...], ...] = ()
    messages: MemberMessages | None = None
    evaluation: tuple[StageModule, ...] = ()


def prepare(
    plan: Plan,
    model: str | Factory | None = None,
    *,
    loss: str | Loss | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
    place: PlanRank | None = None,
    evaluates: bool = False,
    check: bool = False,
) -> Prepared:
    """Build the model, check that it is the planned one, and cut out this rank's stages.

    Only the weights of these stages take up memory.

    Args:
        plan: to be verified.
        model: ``module:factory`` or the factory, if it is not one of the zoo.
        loss: ``module:function`` or the function, if the plan's loss is the user's own.
        seed: of the initial weights and all random numbers, the same on every rank.
        device: of tensors, default the CPU.
        autocast: what torch's autocast lowers operations to.
        place: of this process; default what torchrun or the process group says.
        evaluates: whether the stages are wanted in evaluation mode too.
        check: whether the first rank compares the stages with eager autograd on a small batch.

    Raises:
        PipeplanError: if the plan does not hold, is for another number of processes or for
            another model.
    """
    place = place or PlanRank.of_this_process()
    device = device or torch.device("cpu")
    require_supported()
    require_runnable(plan, place.world_size)
    return_freed_memory()
    factory, own_loss = allowed_factory(plan, model), allowed_loss(plan, loss)
    built = build_model(plan, factory, seed, needed_by(plan, place.rank))
    planned = PlannedModel(plan, built, own_loss, autocast)
    exported, layers = planned.export()
    if plan.job.lengths is not None:
        require_no_writes(exported)
    limits = lookups(exported)
    own = plan.place_of(place.rank)
    shares = ParameterShares(exported, member_shares(planned_split(plan, own.members), own.member))
    rank = _RankStages(place.rank, device, autocast, shares)
    steps = rank.member_steps(plan, exported, layers)
    stages = rank.cut(plan, exported, layers, steps)
    shorter = tuple(rank.cut(plan, *step, {}) for step in planned.export_shorter())
    messages = None
    if len(plan.degrees) > 1:
        sent = messages_by_size(plan, exported, layers, steps)
        messages = MemberMessages.of_plan(plan, place.rank, sent)
    evaluation: tuple[StageModule, ...] = ()
    if evaluates:
        step, forwards = planned.export_in_evaluation()
        evaluation = rank.cut(forwards, *step, rank.member_steps(forwards, *step))
    require_order(plan, stages)
    if check and place.rank == 0:
        logger.info(compare_stages(plan, factory, own_loss))
    unused = _unused(built, exported) if place.rank == 0 else {}
    held = {name: p for stage in stages for name, p in stage.parameters.items()}
    _release_others(built, [*held.values(), *unused.values()])
    for row in (stages, *shorter, evaluation):
        _move(row, device)
        for stage in row:
            set_gradient_types(stage.parameters.values(), plan.job)
    return Prepared(
        plan,
        place,
        device,
        built,
        stages,
        tuple(lower(plan, in_one_order=device.type == "cuda")[place.rank]),
        dict(sorted(held.items())),
        seed,
        autocast,
        unused,
        limits,
        shorter,
        messages,
        evaluation,
    )


@dataclass(frozen=True)
class _RankStages:
    """Cuts the stages of a rank out of exported models.

    Attributes:
        rank: its number.
        device: of its tensors.
        autocast: what torch's autocast lowers operations to.
        shares: parameters as a member of a tensor-parallel group has them.
    """

    rank: int
    device: torch.device
    autocast: torch.dtype | None
    shares: ParameterShares

    def member_steps(
        self, plan: Plan, exported: ExportedStep, layers: LayerAssignment
    ) -> dict[int, MemberStep]:
        """Return what tensor-parallel groups run, by their members.

        Where groups have one size, of these; else of all sizes, whose messages have to fit.
        """
        own = plan.place_of(self.rank).members
        sizes = plan.degrees if len(plan.degrees) > 1 else (own,)
        splits = {size: planned_split(plan, size) for size in sizes}
        cores = cores_of(exported) if plan.job.recompute_attention else ()
        with self._lowering():
            return {
                size: member_step(exported, layers, split, cores)
                for size, split in splits.items()
                if split is not None
            }

    def cut(
        self,
        plan: Plan,
        exported: ExportedStep,
        layers: LayerAssignment,
        steps: Mapping[int, MemberStep],
    ) -> tuple[StageModule, ...]:
        """Cut out the stages; of a tensor-parallel group, by the steps, this member's shares."""
        own = plan.place_of(self.rank)
        mine = [stage.index for stage in plan.stages if own.replica in stage.devices]
        step = steps.get(own.members)
        with self._lowering():
            if step is None:
                return tuple(cut(exported, layers, plan, mine, self.device))
            return tuple(cut_for_member(step, plan, mine, self.shares, self.device))

    def _lowering(self) -> AbstractContextManager[object]:
        enabled = self.autocast is not None
        return torch.autocast("cpu", self.autocast, enabled=enabled, cache_enabled=False)


def needed_by(plan: Plan, rank: int) -> Needed:
    """Return which parameters a rank needs, by name; those that no layer uses are the first's."""
    owners = ParameterOwners.of_plan(plan).ranks
    return lambda name: rank in owners.get(name, (0,))


def require_runnable(plan: Plan, world_size: int) -> None:
    """Refuse plans that do not hold or are for other processes.

    Raises:
        PipeplanError: naming the field and the remedy.
    """
    require_valid(plan)
    if world_size != plan.world_size:
        count = plan.world_size
        raise PipeplanError(
            f"the plan has {count} ranks, {world_size} processes were started; run it with "
            f"torchrun --nproc-per-node {count} -m executor PLAN"
        )


def _unused(model: nn.Module, exported: ExportedStep) -> dict[str, nn.Parameter]:
    used = {id(exported.attribute(n)) for n in exported.graph.find_nodes(op="get_attr") if n.users}
    return {name: p for name, p in model.named_parameters() if id(p) not in used}


def _release_others(model: nn.Module, held: Iterable[nn.Parameter]) -> None:
    """Free the weights that other ranks hold; the model stays to describe its batches."""
    mine = {id(parameter) for parameter in held}
    for parameter in model.parameters():
        if id(parameter) not in mine:
            parameter.data = parameter.data.new_empty(0)


def _move(stages: tuple[StageModule, ...], device: torch.device) -> None:
    """Move what this rank holds; a tied parameter stays one."""
    for stage in stages:
        for tensor in (*stage.parameters.values(), *stage.buffers.values()):
            tensor.data = tensor.data.to(device)
