"""Writes and resumes a training's checkpoint, by the model's own names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.checkpoint.write import save_checkpoint
from executor.distributed.expert_rows import Members
from executor.distributed.member_group import (
    MemberShare,
    TensorParallelGroup,
    member_shares,
)
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared
from executor.sync.shared_parameters import ParameterOwners, planned_split
from executor.training.loss_scale import LossScale
from executor.training.optimisation import Optimisation
from executor.training.optimizer import import_state, optimizer_name
from executor.training.state_shards import StateShards
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.records.document import digest_of_data

logger = logging.getLogger(__name__)


class SavedState:
    """Writes and reads this rank's part of a training.

    Every tensor is written whole, by the first rank that holds it or the first member of the group
    that does, and read by all that do, whatever plan wrote it.

    Args:
        prepared: this rank's stages.
        config: of the training.
    """

    def __init__(self, prepared: Prepared, config: TrainingConfig) -> None:
        self.prepared = prepared
        self.config = config
        self.seed = config.seed
        names = set(prepared.model.state_dict())
        self.buffers = {
            name: buffer
            for stage in prepared.stages
            for name, buffer in stage.buffers.items()
            if name in names
        }
        plan, rank = prepared.plan, prepared.place.rank
        place = plan.place_of(rank)
        self._member = place.member
        self._shares = member_shares(planned_split(plan, place.members), self._member)
        # The first member of a group writes what the shares of all make.
        self._first = ParameterOwners.of_plan(plan).first_held(rank - self._member)

    def save(
        self,
        folder: str | Path,
        step: int,
        optimisation: Optimisation,
        samples_seen: int,
        keep: int | None,
        members: Members | None = None,
        process_groups: Mapping[tuple[int, ...], Any] | None = None,
        data_state: Any = None,
    ) -> Path:
        """Write a checkpoint; all ranks call it.

        Args:
            folder: of all checkpoints.
            step: that was done.
            optimisation: of this rank's parameters.
            samples_seen: so far.
            keep: how many checkpoints stay.
            members: of this rank's tensor-parallel group, if it is in one.
            process_groups: by their ranks, if ranks share the optimizer's state.
            data_state: where the training's stream of samples is, plain JSON.

        Raises:
            PipeplanError: on all ranks, if weights are not finite; nothing is written then.
        """
        ranks = Ranks.of_process_group()
        ranks.together(lambda: _require_finite(optimisation, step, folder))
        plan = self.prepared.plan
        scale = optimisation.loss_scale
        facts: dict[str, Any] = {
            "seed": self.seed,
            "samples_seen": samples_seen,
            "data_state": data_state,
            "model": plan.model.name,
            "model_digest": _model_digest(plan),
            "plan_digest": plan.execution_digest,
            "precision": plan.job.precision,
            "optimizer": optimizer_name(optimisation.optimizer),
            "loss_scale": None if scale is None else scale.facts(),
            "schedule": self.config.schedule_facts(step),
        }
        tensors = self._tensors(optimisation, process_groups or {})
        if members is not None:
            tensors = self._joined(tensors, TensorParallelGroup(members))
        written = save_checkpoint(folder, step, tensors, facts, ranks=ranks, keep=keep)
        if self.prepared.place.rank == 0:
            logger.info("wrote %s", written)
        return written

    def _tensors(
        self, optimisation: Optimisation, process_groups: Mapping[tuple[int, ...], Any]
    ) -> dict[str, Tensor]:
        weights = optimisation.weights
        state = {
            **{f"master/{name}": master for name, master in weights.state().items()},
            **{f"optimizer/{name}": tensor for name, tensor in weights.optimizer_state().items()},
        }
        if optimisation.shards is not None:
            state = optimisation.shards.joined(state, process_groups)
        found = {
            **{f"parameters/{n}": p.detach() for n, p in self.prepared.parameters.items()},
            **{f"buffers/{name}": buffer for name, buffer in self.buffers.items()},
            **state,
        }
        mine = {name: t for name, t in found.items() if self._is_first(name)}
        unused = {f"parameters/{n}": p.detach() for n, p in self.prepared.unused.items()}
        return {**mine, **unused}

    def _joined(
        self, tensors: Mapping[str, Tensor], group: TensorParallelGroup
    ) -> dict[str, Tensor]:
        """Return whole tensors of the shares of all members, on the first of them."""
        found = {}
        for name, tensor in tensors.items():
            share = self._share_of(name)
            if share is not None and self._is_like_parameter(name, tensor.shape):
                tensor = group.joined(tensor, share.dimension, share.parts).cpu()
            elif share is not None and tensor.numel() > 1:
                own = self.prepared.parameters[_parameter_of(name)].shape
                raise PipeplanError(
                    f"{name} has shape {list(tensor.shape)}, the share of its parameter here "
                    f"{list(own)}: the members of a tensor-parallel group cannot put it together; "
                    "train with an optimizer such as AdamW or SGD, or without checkpoints"
                )
            if self._member == 0:
                found[name] = tensor
        return found

    def _share_of(self, name: str) -> MemberShare | None:
        """Return which share of a checkpoint's tensor this rank holds; None: all of it."""
        return self._shares.get(_parameter_of(name))

    def _own(self, name: str, tensor: Tensor, shards: StateShards | None) -> Tensor:
        """Return this rank's part of a checkpoint's tensor; a number is whole.

        Args:
            name: of the tensor.
            tensor: as the checkpoint has it.
            shards: of the state that ranks share.
        """
        share, parameter = self._share_of(name), _parameter_of(name)
        own = self.prepared.parameters[parameter].shape
        if share is not None and tensor.shape == share.whole_shape(own):
            tensor = share.of(tensor)
        if shards is None or tensor.shape != own:
            return tensor
        return shards.of(parameter, name.rpartition("/")[2], tensor)

    def _is_like_parameter(self, name: str, shape: torch.Size) -> bool:
        return shape == self.prepared.parameters[_parameter_of(name)].shape

    def _is_first(self, name: str) -> bool:
        return _parameter_of(name) in self._first

    def require_fits(self, checkpoint: Checkpoint | None) -> int:
        """Refuse a checkpoint of another training.

        Returns:
            The step it was written after; 0 if there is none.

        Raises:
            PipeplanError: naming each difference and its remedy.
        """
        if checkpoint is None:
            return 0
        plan, facts, where = self.prepared.plan, checkpoint.facts, checkpoint.folder
        expected = {
            "model_digest": _model_digest(plan),
            "precision": plan.job.precision,
            "seed": self.seed,
        }
        remedies = {
            "model_digest": f"it is of {facts.get('model')!r}, the plan of {plan.model.name!r}; "
            "plan the model it was trained with, with the same model_arguments",
            "precision": "plan in the precision it was trained in",
            "seed": "train with its seed, or the order of samples changes",
        }
        problems = [
            f"{where}: {name} is {facts.get(name)!r}, here it is {value!r}; {remedies[name]}"
            for name, value in expected.items()
            if facts.get(name) != value
        ]
        seen = facts.get("samples_seen")
        if not isinstance(seen, int) or isinstance(seen, bool) or seen < 0:
            problems.append(
                f"{where}: samples_seen is {seen!r}, which is no count of samples; take another "
                "checkpoint"
            )
        if problems:
            raise PipeplanError(problems)
        return checkpoint.step

    def load(self, checkpoint: Checkpoint, optimisation: Optimisation) -> None:
        """Take up this rank's part.

        Raises:
            PipeplanError: if tensors are missing or of another form.
        """
        kind = optimizer_name(optimisation.optimizer)
        if checkpoint.facts.get("optimizer") != kind:
            raise PipeplanError(
                f"{checkpoint.folder}: it was trained by {checkpoint.facts.get('optimizer')}, "
                f"here it is {kind}; use the same optimizer"
            )
        weights = optimisation.weights
        targets: dict[str, Tensor] = {
            **{f"parameters/{name}": p for name, p in self.prepared.parameters.items()},
            **{f"parameters/{name}": p for name, p in self.prepared.unused.items()},
            **{f"buffers/{name}": buffer for name, buffer in self.buffers.items()},
        }
        with torch.no_grad():
            shares = {name: s for name in targets if (s := self._share_of(name)) is not None}
            checkpoint.read_into(targets, shares)
        shards = optimisation.shards
        masters = checkpoint.read([f"master/{name}" for name in weights.state()])
        weights.load(
            {n.removeprefix("master/"): self._own(n, t, shards) for n, t in masters.items()}
        )
        names = [n for n in checkpoint.names("optimizer/") if _parameter_of(n) in weights.masters]
        read = checkpoint.read(names)
        state = {n.removeprefix("optimizer/"): self._own(n, t, shards) for n, t in read.items()}
        import_state(weights.optimizer, weights.masters, state)
        if optimisation.loss_scale is not None:
            facts = checkpoint.facts["loss_scale"]
            optimisation.resume_scale(LossScale.from_facts(facts, str(checkpoint.folder)))


def _require_finite(optimisation: Optimisation, step: int, folder: str | Path) -> None:
    masters = optimisation.weights.masters.items()
    wrong = [name for name, master in masters if not master.detach().isfinite().all()]
    if wrong:
        raise PipeplanError(
            f"step {step}: {', '.join(wrong[:5])} hold NaN or inf: training diverges; no "
            f"checkpoint is written, those in {folder} stay; resume with a lower learning rate"
        )


def _parameter_of(name: str) -> str:
    """The parameter or buffer that a checkpoint's tensor belongs to."""
    kind, _, rest = name.partition("/")
    # An optimizer's state has its own name after the parameter's.
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def warn_of_schedule(checkpoint: Checkpoint, config: TrainingConfig) -> None:
    """Say so if the learning rate goes on otherwise than the checkpoint's training would."""
    recorded, here = checkpoint.facts.get("schedule"), config.schedule_facts(checkpoint.step)
    if not isinstance(recorded, dict):
        return
    before = dict(recorded)
    was, is_ = before.pop("next_factor", None), here.pop("next_factor")
    if before == here and (was == is_ or was is None):
        return
    factors = ""
    if isinstance(was, float) and isinstance(is_, float):
        factors = f"the factor of step {checkpoint.step + 1} is {is_:.4g}, not {was:.4g}; "
    logger.warning(
        "%s: the learning rate's schedule was %s, here it is %s; %sresume with the steps and the "
        "[schedule] it was trained with, unless you mean to change the rate",
        checkpoint.folder,
        _words(before),
        _words(here),
        factors,
    )


def _words(schedule: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in schedule.items())


def _model_digest(plan: Plan) -> str:
    """Return the digest of the parameters and buffers, whatever the microbatches and stages."""
    return digest_of_data({p.name: p.elements for p in plan.model.graph.parameters})
