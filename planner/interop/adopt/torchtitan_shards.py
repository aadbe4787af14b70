"""How torchtitan's data-parallel ranks hold the model: copies of it, and shards of a copy (FSDP).

A plan divides weights (:attr:`planner.space.Space.shard_parameters`) where layers are gathered for
each forward and each backward (``fsdp_reshard_after_forward``). Where they stay gathered until the
end of an iteration, each rank holds whole weights and gradients meanwhile, and gathers and reduces
them once: that is :attr:`planner.space.Space.shard_optimizer`, but for FSDP's own share of both.
The policies are those of ``torchtitan/distributed/fsdp.py``, b5bcd76.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import shorten
from planner.interop.adopt.torchtitan_stages import TorchtitanFields

_TYPE = "training.data_parallel_type"
_SHARDS = "parallelism.data_parallel_shard_degree"
_COPIES = "parallelism.data_parallel_replicate_degree"
_RESHARDS = "parallelism.fsdp_reshard_after_forward"


@dataclass(frozen=True)
class DataParallel:
    """How data-parallel ranks hold the model.

    Attributes:
        copies: of it, each on its ranks; None: as many as there are devices for.
        shards: ranks that share a copy; None: as many as there are devices for.
        gathers_always: whether they gather a layer for each forward and each backward.
    """

    copies: int | None
    shards: int | None
    gathers_always: bool

    @classmethod
    def of(cls, found: TorchtitanFields, size: int) -> DataParallel:
        """Return what the file says; before HSDP it was one degree with a type."""
        copies: int | None = found.number(_COPIES, 1)
        shards, kind = found.number(_SHARDS, -1, -1), found.value(_TYPE)
        if kind not in (None, "fsdp", "ddp"):
            found.wrong(_TYPE, f"{shorten(kind)}: expected fsdp or ddp")
        if shards == 0:
            found.wrong(_SHARDS, "0: expected a whole number of at least 1, or -1 for the rest")
        if kind == "ddp":
            copies, shards = (None if shards == -1 else shards), 1
        policy = found.value(_RESHARDS) or "default"
        if policy not in ("default", "always", "never"):
            found.wrong(_RESHARDS, f"{shorten(policy)}: expected default, always or never")
        always = policy == "always" or (policy == "default" and size == 1)
        return cls(copies, None if shards == -1 else shards, always)

    @property
    def replicas(self) -> int | None:
        """Data-parallel pipelines, if their number is told."""
        if self.copies is None or self.shards is None:
            return None
        return self.copies * self.shards

    @property
    def is_shared(self) -> bool:
        """Whether all pipelines share one copy, if there are several."""
        return self.copies == 1 and self.shards != 1

    @property
    def notes(self) -> Iterator[str]:
        """What is predicted otherwise than torchtitan does it."""
        if self.is_shared and not self.gathers_always:
            yield (
                "parallelism.fsdp_reshard_after_forward: weights stay gathered from their first "
                "forward on, so a plan counts weights and gradients whole and shares the "
                "optimizer's state (shard_optimizer) where there are several pipelines; FSDP's own "
                "share of both, which a rank holds besides, is not counted"
            )

    def problem(self, found: TorchtitanFields, degree: int, replicas: int) -> str | None:
        """Return why plans cannot express it.

        Args:
            found: the file.
            degree: devices of a tensor-parallel group.
            replicas: data-parallel pipelines.
        """
        if self.copies is None:
            return None
        if replicas % self.copies:
            return (
                f"{found.called(_COPIES)}: {self.copies} copies cannot share {replicas} "
                "data-parallel ranks equally; correct one of them"
            )
        if replicas == self.copies:
            return None
        if self.copies > 1:
            return (
                f"{found.called(_SHARDS)}: {replicas // self.copies} shards of {self.copies} "
                "copies (HSDP), but in plans all pipelines share one; set "
                "data_parallel_replicate_degree to 1, or data_parallel_shard_degree to 1"
            )
        if self.gathers_always and degree > 1:
            return (
                f"{found.called(_RESHARDS)}: layers of tensor-parallel groups are gathered for "
                "every microbatch, but plans divide weights over single devices alone; set it to "
                '"never", or tensor_parallel_degree to 1'
            )
        return None
