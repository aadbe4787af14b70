"""Writes and resumes a training's checkpoint, by the model's own names."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from executor.checkpoint import Box, Checkpoint, Piece, Ranks, save_checkpoint
from executor.distributed.member_group import MemberShare, member_shares
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared
from executor.sync.shared_parameters import ParameterOwners, planned_split
from executor.training.loss_scale import LossScale
from executor.training.optimisation import Optimisation
from executor.training.optimizer import import_state, optimizer_name
from executor.training.state_shards import STEP_COUNTERS, StateShards
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.records.document import digest_of_data

logger = logging.getLogger(__name__)


class SavedState:
    """Writes and reads this rank's part of a training.

    Each rank writes the pieces of tensors that it is the first to hold. Every rank reads whole
    tensors and keeps its part of them, whatever plan wrote them.

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
        self._shares = member_shares(planned_split(plan, place.members), place.member)
        self._first = ParameterOwners.of_plan(plan).first_held(rank)

    def save(
        self,
        folder: str | Path,
        step: int,
        optimisation: Optimisation,
        samples_seen: int,
        keep: int | None,
        data_state: Any = None,
    ) -> Path:
        """Write a checkpoint; all ranks call it.

        Args:
            folder: of all checkpoints.
            step: that was done.
            optimisation: of this rank's parameters.
            samples_seen: so far.
            keep: how many checkpoints stay.
            data_state: where the training's stream of samples is, plain JSON.

        Raises:
            PipeplanError: on all ranks, if weights are not finite or a rank cannot write.
        """
        ranks, tensors = Ranks.of_process_group(), dict[str, Tensor | Sequence[Piece]]()

        def collect() -> None:
            _require_finite(optimisation, step, folder)
            tensors.update(self._written(optimisation))

        ranks.together(collect)
        plan, scale = self.prepared.plan, optimisation.loss_scale
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
        written = save_checkpoint(folder, step, tensors, facts, ranks=ranks, keep=keep)
        if self.prepared.place.rank == 0:
            logger.info("wrote %s", written)
        return written

    def _written(self, optimisation: Optimisation) -> dict[str, Tensor | Sequence[Piece]]:
        """Return what this rank writes, by name."""
        weights, shards = optimisation.weights, optimisation.shards
        own: dict[str, Tensor] = {
            f"parameters/{name}": p for name, p in self.prepared.parameters.items()
        }
        own |= {f"buffers/{name}": buffer for name, buffer in self.buffers.items()}
        state = {f"master/{name}": master for name, master in weights.state().items()}
        state |= {f"optimizer/{name}": t for name, t in weights.optimizer_state().items()}
        found: dict[str, Tensor | Sequence[Piece]] = {
            f"parameters/{name}": p for name, p in self.prepared.unused.items()
        }
        for name, tensor in own.items():
            if _parameter_of(name) in self._first:
                found[name] = self._pieces(name, tensor, None)
        for name, tensor in state.items():
            if optimisation.is_counted(_parameter_of(name)):
                found[name] = self._pieces(name, tensor, shards)
        return found

    def _pieces(
        self, name: str, tensor: Tensor, shards: StateShards | None
    ) -> Tensor | Sequence[Piece]:
        """Return a tensor, or its pieces if other ranks have parts of it too."""
        parameter = _parameter_of(name)
        share = self._shares.get(parameter)
        part = None if shards is None else shards.slices.get(parameter)
        if share is None and part is None:
            return tensor
        local = self.prepared.parameters[parameter].shape
        expected, begin = (local, 0) if part is None else (part.parameter.shape, part.begin)
        if name.rpartition("/")[2] not in STEP_COUNTERS and tensor.shape == expected:
            return [*pieces_of(tensor, local, begin, share)]
        if tensor.numel() > 1:
            raise PipeplanError(
                f"{name} has shape {list(tensor.shape)}, the part of its parameter that this rank "
                f"trains has {list(expected)}: no checkpoint can put it together; train with an "
                "optimizer such as AdamW or SGD, or without checkpoints"
            )
        # A number is the same on all ranks.
        is_first = begin == 0 and (share is None or share.index == 0)
        return tensor if is_first else []

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
        of_model = f"it is of {facts.get('model')!r}, the plan of {plan.model.name!r}; plan the "
        of_model += "model it was trained with, with the same model_arguments"
        expected = {
            "model_digest": (_model_digest(plan), of_model),
            "precision": (plan.job.precision, "plan in the precision it was trained in"),
            "seed": (self.seed, "train with its seed, or the order of samples changes"),
        }
        problems = [
            f"{where}: {name} is {facts.get(name)!r}, here it is {value!r}; {remedy}"
            for name, (value, remedy) in expected.items()
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
        weights, shards = optimisation.weights, optimisation.shards
        held: dict[str, Tensor] = {
            f"parameters/{name}": p for name, p in self.prepared.parameters.items()
        }
        held |= {f"parameters/{name}": p for name, p in self.prepared.unused.items()}
        held |= {f"buffers/{name}": buffer for name, buffer in self.buffers.items()}
        checkpoint.read_into(held, lambda name, whole: self._own(name, whole, None))
        masters = {f"master/{name}": master for name, master in weights.state().items()}
        checkpoint.read_into(masters, lambda name, whole: self._own(name, whole, shards))
        weights.copy_back()
        state = {}
        for name in checkpoint.names("optimizer/"):
            if _parameter_of(name) in weights.masters:
                own = self._own(name, checkpoint.read([name])[name], shards)
                state[name.removeprefix("optimizer/")] = own
        import_state(weights.optimizer, weights.masters, state)
        if optimisation.loss_scale is not None:
            facts = checkpoint.facts["loss_scale"]
            optimisation.resume_scale(LossScale.from_facts(facts, str(checkpoint.folder)))

    def _own(self, name: str, tensor: Tensor, shards: StateShards | None) -> Tensor:
        """Return this rank's part of a checkpoint's tensor; a number is whole."""
        parameter = _parameter_of(name)
        share, held = self._shares.get(parameter), self.prepared.parameters.get(parameter)
        if held is None:
            return tensor
        if share is not None and tensor.shape == share.whole_shape(held.shape):
            tensor = share.of(tensor)
        if shards is None or tensor.shape != held.shape:
            return tensor
        return shards.of(parameter, name.rpartition("/")[2], tensor)


def pieces_of(
    value: Tensor, shape: Sequence[int], begin: int = 0, share: MemberShare | None = None
) -> Iterator[Piece]:
    """Yield the boxes of a tensor that make up a part of it.

    Args:
        value: consecutive elements of a member's share of the tensor, or of all of it.
        shape: of the share.
        begin: number of the first element in the flat share.
        share: of the member; None: it has the whole tensor.
    """
    flat = value.detach().reshape(-1)
    for start, size in boxes(shape, begin, begin + flat.numel()):
        box, flat = flat[: math.prod(size)].view(size), flat[math.prod(size) :]
        if share is None:
            yield Box(start, tuple(shape)), box
            continue
        # The share is made of an equal share of each part of a dimension, one after the other.
        own, whole, d = 0, 0, share.dimension
        for part in share.parts:
            length = part // share.degree
            first, last = max(start[d], own), min(start[d] + size[d], own + length)
            if first < last:
                place = whole + share.index * length + first - own
                offset = (*start[:d], place, *start[d + 1 :])
                piece = box.narrow(d, first - start[d], last - first)
                yield Box(offset, share.whole_shape(shape)), piece
            own, whole = own + length, whole + part


Numbers = tuple[int, ...]


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the offsets and sizes of boxes that make up a range of a flat tensor, in its order.

    Args:
        shape: of the tensor.
        begin: of the range, in elements.
        end: of the range.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # The range lies inside of one row.
        rows = [(last, begin - last * row, end - last * row)]
    else:
        rows = [(first - 1, begin - (first - 1) * row, row)] if begin < first * row else []
    for number, start, stop in rows:
        yield from _in_row(number, boxes(shape[1:], start, stop))
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last and last * row < end:
        yield from _in_row(last, boxes(shape[1:], 0, end - last * row))


def _in_row(
    number: int, found: Iterator[tuple[Numbers, Numbers]]
) -> Iterator[tuple[Numbers, Numbers]]:
    for offset, size in found:
        yield (number, *offset), (1, *size)


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
