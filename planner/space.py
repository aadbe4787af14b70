"""The freedoms that a plan may use: what the job allows, a bound covers and `verify` checks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from planner.records.document import MOST_ENTRIES, Record, left_out
from planner.units import plural

Backward = Literal["whole", "split", "any"]
Placement = Literal["loop", "loop_or_v", "any"]
Order = Literal["1f1b", "any"]
MOST_TENSOR_PARALLEL = 256
WITH_SHARDED_PARAMETERS: Mapping[str, Any] = {"equal_pipelines": True, "backward": "whole"}
"""Fields of a job whose replicas divide weights and gradients: they run the same operations."""


class Space(Record):
    """The freedoms of plans that cut the chain of layers into stages.

    Attributes:
        min_stages: Smallest number of stages.
        max_stages: Largest number of stages; null: no limit.
        cuts: Layers before which a stage may begin, besides the first layer; null: any.
        max_stages_per_device: Largest number of stages per device; 2 or more allow interleaved
            plans.
        placement: ``loop``: stage s is on device s mod D, with two devices or more; ``loop_or_v``:
            or two stages a device, through the devices and back; ``any``. With replicas the same
            holds for the sets of devices.
        backward: ``whole``: every backward is one operation; ``split``: every backward is an input
            gradient and, later, a weight gradient (zero bubble); ``any``: chosen for each.
        order: ``1f1b``: each device runs its microbatches in the order of 1F1B, interleaved 1F1B
            if it holds several stages; ``any``.
        replication: Whether a stage may have several devices.
        equal_pipelines: Whether replicas must form equal pipelines: as many of each stage, which
            keep their microbatches to themselves and run equally many of them in the same order.
        recompute: Whether a layer's forward may run again in its backward, to save memory;
            ``blocks``: that of the first N numbered blocks of every stage alone, as in Megatron-LM.
        overlap_reduction: Whether the gradients of a stage may be reduced in buckets while its last
            backwards still run; otherwise at once after the last of them.
        tensor_parallel: Devices of each tensor-parallel group that holds a stage, of one type; 1:
            no groups; ``any``: the best of 1 and every number for which the layer graph has a
            split, perhaps another one in each stage.
        sequence_parallel: Whether the devices of a group share values between the split parts of
            layers by positions.
        shard_optimizer: Whether the replicas of a stage share the optimizer's state among them
            (ZeRO-1); ``if_needed``: only if no plan fits without, which a search decides once.
        shard_parameters: Whether each of them also keeps only a part of the weights and gradients
            of every layer, which are put together while the layer runs (ZeRO-3, FSDP); it
            includes ``shard_optimizer``; ``if_needed``: only if no plan fits without.
        offload: Whether stashes of layers may be copied to the host over the device's host link,
            to save memory; ``if_needed``: only if no plan fits without, which a search decides
            once.
    """

    min_stages: Annotated[int, Field(ge=1)] = 1
    max_stages: Annotated[int, Field(ge=1)] | None = None
    cuts: tuple[str, ...] | None = None
    max_stages_per_device: Annotated[int, Field(ge=1, le=16)] = 1
    placement: Placement = "any"
    backward: Backward = "any"
    order: Order = "any"
    replication: bool = True
    equal_pipelines: bool = False
    recompute: bool | Literal["blocks"] = True
    overlap_reduction: bool = True
    tensor_parallel: Annotated[int, Field(ge=1, le=MOST_TENSOR_PARALLEL)] | Literal["any"] = 1
    sequence_parallel: bool = False
    shard_optimizer: bool | Literal["if_needed"] = False
    shard_parameters: bool | Literal["if_needed"] = False
    offload: bool | Literal["if_needed"] = False

    @model_validator(mode="after")
    def _orders_exist(self) -> Space:
        if self.order == "1f1b" and self.backward == "split":
            raise ValueError('order = "1f1b" has whole backwards; set backward = "whole"')
        if self.order == "1f1b" and self.replication and not self.equal_pipelines:
            raise ValueError(
                'order = "1f1b" is defined for one pipeline or for equal ones; set '
                "equal_pipelines = true or replication = false"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel = true shares values among the devices of a tensor-parallel "
                'group; set tensor_parallel to their number or "any"'
            )
        if self.shard_optimizer and not self.replication:
            raise ValueError(
                f"shard_optimizer = {json.dumps(self.shard_optimizer)} shares the optimizer's "
                "state among replicas, but replication = false; set replication = true or "
                "shard_optimizer = false"
            )
        if self.shard_parameters:
            self._require_to_shard_parameters()
        if self.offload and self.backward == "split":
            raise ValueError(
                f"offload = {json.dumps(self.offload)} is for whole backwards; set "
                'backward = "any" or offload = false'
            )
        if self.offload and self.tensor_parallel != 1:
            raise ValueError(
                f"offload = {json.dumps(self.offload)} is for single devices; set "
                "tensor_parallel = 1 or offload = false"
            )
        if self.max_stages is not None and self.min_stages > self.max_stages:
            raise ValueError(
                f"min_stages = {self.min_stages} is above max_stages = {self.max_stages}; "
                "exchange them"
            )
        return self

    def _require_to_shard_parameters(self) -> None:
        """Refuse what replicas that put layers together cannot do, or do not do yet."""
        told = f"shard_parameters = {json.dumps(self.shard_parameters)}"
        if not self.replication:
            raise ValueError(
                f"{told} divides weights and gradients among replicas, but replication = false; "
                "set replication = true or shard_parameters = false"
            )
        if self.shards_parameters and not (self.equal_pipelines and self.backward == "whole"):
            raise ValueError(
                f"{told}: replicas put each layer together at the same time, so they have to run "
                'the same operations; set equal_pipelines = true and backward = "whole"'
            )
        if self.backward == "split":
            raise ValueError(
                f'{told} is for whole backwards; set backward = "any" or shard_parameters = false'
            )
        for name, usual in (("tensor_parallel", 1), ("offload", False)):
            if getattr(self, name) != usual:
                raise ValueError(
                    f"{told} is not there together with {name} = "
                    f"{json.dumps(getattr(self, name))}; set {name} = {json.dumps(usual)} or "
                    "shard_parameters = false"
                )

    @property
    def shards_parameters(self) -> bool:
        """Whether replicas divide weights and gradients among them, in every plan."""
        return self.shard_parameters is True

    @property
    def shards_state(self) -> bool:
        """Whether replicas share the optimizer's state, in every plan."""
        return self.shard_optimizer is True or self.shards_parameters

    @property
    def sharing_field(self) -> str:
        """The field by which replicas share the optimizer's state, for messages."""
        return "shard_parameters" if self.shards_parameters else "shard_optimizer"

    @property
    def splits(self) -> bool:
        """Whether a backward may run as input and weight gradient."""
        return self.backward != "whole" and self.order != "1f1b"

    @property
    def not_proved_with(self) -> tuple[str, ...]:
        """The plans beyond the space that proofs of bounds allow, in words."""
        found = []
        if self.order != "any":
            found.append("any order")
        if self.placement != "any" and self.max_stages_per_device > 1:
            found.append("any placement")
        if self.has_pipelines:
            found.append("microbatches that change pipelines")
        if self.recompute == "blocks":
            found.append("any layers recomputed")
        return tuple(found)

    @property
    def has_pipelines(self) -> bool:
        """Whether replicas are allowed, and must form equal pipelines."""
        return self.replication and self.equal_pipelines

    def __str__(self) -> str:
        parts = [*self._stages_in_words(), _BACKWARDS[self.backward], *self._replicas_in_words()]
        parts.append(_RECOMPUTE[self.recompute])
        if self.order == "1f1b":
            parts.append("in the order of 1F1B")
        if self.overlap_reduction:
            parts.append("reductions overlapped with backwards")
        parts += self._groups_in_words()
        if self.shard_parameters:
            parts.append("weights, gradients and optimizer state shared by replicas")
        elif self.shard_optimizer:
            parts.append("optimizer state shared by replicas")
        if self.offload:
            parts.append("stashes offloaded to the host")
        return ", ".join(parts)

    def _stages_in_words(self) -> Iterator[str]:
        if self.min_stages > 1:
            yield f"at least {plural(self.min_stages, 'stage')}"
        if self.max_stages is not None:
            yield f"at most {plural(self.max_stages, 'stage')}"
        if self.cuts is not None:
            yield f"cuts at {plural(len(self.cuts), 'place')} only"
        where = _PLACEMENTS[self.placement] if self.max_stages_per_device > 1 else ""
        yield f"up to {plural(self.max_stages_per_device, 'stage')} a device{where}"

    def _groups_in_words(self) -> Iterator[str]:
        if self.tensor_parallel == "any":
            yield "single devices or one packing of them in tensor-parallel groups of one size"
        elif self.tensor_parallel > 1:
            yield f"one packing of devices in tensor-parallel groups of {self.tensor_parallel}"
        if self.sequence_parallel:
            yield "values shared by positions"

    def _replicas_in_words(self) -> Iterator[str]:
        if not self.replication:
            yield "no replicas"
        else:
            yield "equal pipelines" if self.equal_pipelines else "any replication"


_BACKWARDS = {
    "whole": "whole backwards",
    "split": "split backwards",
    "any": "whole or split backwards",
}
_RECOMPUTE = {
    True: "any layers recomputed",
    False: "no recompute",
    "blocks": "the first blocks of every stage recomputed",
}
_PLACEMENTS = {"loop": " in a loop", "loop_or_v": " in a loop or a V", "any": ""}


class BoundCovers(Record):
    """The plans that a lower bound covers.

    Attributes:
        space: The freedoms these plans may use; null if the bound covers nothing.
        own_constraints: Whether only plans that keep constraints of one's own are covered
            (``constrain=`` of ``planner.solve``).
        packings: Digests of the packings in tensor-parallel groups of several sizes that are
            covered besides those of one size, where the space has ``any``.
        reason: Why nothing is covered; null if something is.
    """

    space: Space | None
    own_constraints: bool = False
    packings: Annotated[tuple[str, ...], Field(max_length=MOST_ENTRIES)] = left_out(())
    reason: str | None = None

    def __str__(self) -> str:
        if self.space is None:
            return "nothing" if self.reason is None else f"nothing: {self.reason}"
        own = ", under constraints of one's own" if self.own_constraints else ""
        count = len(self.packings)
        mixed = f", or {plural(count, 'packing')} in groups of several sizes" if count else ""
        return f"every plan that cuts the chain of layers, with {self.space}{mixed}{own}"


def covers_nothing(reason: str) -> BoundCovers:
    """Return the coverage of a plan without a bound."""
    return BoundCovers(space=None, reason=reason)


def widened(backward: Backward, kinds: Iterable[str]) -> Backward:
    """Return the kinds of backward of a job that shall allow operations of some kinds as well."""
    used = backward_of(kinds)
    return backward if backward in ("any", used) else "any"


def backward_of(kinds: Iterable[str]) -> Backward:
    """Return the least freedom of backwards that operations of these kinds need.

    Args:
        kinds: letters of operations, see :mod:`planner.plan.operations`.
    """
    found = set(kinds)
    if "B" in found and found & {"I", "W"}:
        return "any"
    return "split" if found & {"I", "W"} else "whole"
