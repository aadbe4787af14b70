"""How torchtitan's data-parallel ranks hold the model: copies of it, and shards of a copy (FSDP).

Without a pipeline FSDP gathers a layer for its forward and again for its backward and reduces its
gradients then, for every microbatch: :attr:`planner.space.Space.shard_parameters`. In a pipeline
torch reduces gradients once, after the last backward (``_PipelineStageBase.perform_reduce_grad``
and ``backward_maybe_with_nosync``, torch 2.13), and weights that are not resharded after a forward
are gathered once as well (``get_fsdp_reshard_after_forward_policy``, torchtitan b5bcd76). A rank
holds whole weights and gradients until then, which is :attr:`planner.space.Space.shard_optimizer`
but for FSDP's own share of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import shorten
from planner.interop.adopt.torchtitan_stages import TorchtitanFields

_SHARDS = "parallelism.data_parallel_shard_degree"
_COPIES = "parallelism.data_parallel_replicate_degree"
_RESHARDS = "parallelism.fsdp_reshard_after_forward"


@dataclass(frozen=True)
class DataParallel:
    """How data-parallel ranks hold the model.

    Attributes:
        copies: of it, each on its ranks.
        shards: ranks that share a copy; None: as many as there are devices for.
        size: pipeline ranks.
        policy: whether weights are resharded after a forward: ``default``, ``always``, ``never``.
    """

    copies: int
    shards: int | None
    size: int
    policy: str

    @classmethod
    def of(cls, found: TorchtitanFields, size: int) -> DataParallel:
        """Return what the file says."""
        copies, shards = found.number(_COPIES, 1), found.number(_SHARDS, -1, -1)
        if shards == 0:
            found.wrong(_SHARDS, "0: expected a whole number of at least 1, or -1 for the rest")
        policy = found.value(_RESHARDS) or "default"
        if policy not in ("default", "always", "never"):
            found.wrong(_RESHARDS, f"{shorten(policy)}: expected default, always or never")
        return cls(copies, None if shards == -1 else shards, size, str(policy))

    @property
    def replicas(self) -> int | None:
        """Data-parallel pipelines, if their number is told."""
        return None if self.shards is None else self.copies * self.shards

    @property
    def is_shared(self) -> bool:
        """Whether all pipelines share one copy, if there are several."""
        return self.copies == 1 and self.shards != 1

    @property
    def shares_state(self) -> bool:
        """Whether pipelines share the optimizer's state alone, if there are several."""
        return self.is_shared and self.size > 1

    @property
    def shares_weights(self) -> bool:
        """Whether ranks share weights and gradients too, if there are several."""
        return self.is_shared and self.size == 1

    @property
    def notes(self) -> Iterator[str]:
        """What is predicted otherwise than torchtitan does it."""
        if self.shares_state:
            yield (
                f"{_SHARDS}: in a pipeline FSDP keeps weights gathered and gradients whole until "
                "the end of an iteration, so several pipelines share the optimizer's state "
                "(shard_optimizer) here; FSDP's own share of weights and gradients, which a rank "
                "holds besides, is not counted"
            )

    def problem(self, found: TorchtitanFields, degree: int, replicas: int) -> str | None:
        """Return why plans cannot express it.

        Args:
            found: the file.
            degree: devices of a tensor-parallel group.
            replicas: data-parallel pipelines.
        """
        if replicas % self.copies:
            return (
                f"{_COPIES}: {self.copies} copies cannot share {replicas} "
                "data-parallel ranks equally; correct one of them"
            )
        if replicas == self.copies:
            return None
        if self.copies > 1:
            return (
                f"{_SHARDS}: {replicas // self.copies} shards of {self.copies} "
                "copies (HSDP), but in plans all pipelines share one; set "
                "data_parallel_replicate_degree to 1, or data_parallel_shard_degree to 1"
            )
        return self._policy_problem(found, degree)

    def _policy_problem(self, found: TorchtitanFields, degree: int) -> str | None:
        """Return why plans gather weights otherwise."""
        where = f"{_RESHARDS}: {self.policy}"
        if self.size > 1 and self.policy == "always":
            return (
                f"{where}: a pipeline gathers weights for every microbatch then, but keeps whole "
                "gradients, and whole weights after a backward; plans have neither without the "
                'other, and it saves no memory: set it to "default"'
            )
        if self.size == 1 and self.policy == "never":
            return (
                f"{where}: weights are gathered for a microbatch's forward and kept until its "
                "backward, but plans gather them again or keep them for an iteration; set it to "
                '"default"'
            )
        if self.size == 1 and degree > 1:
            return (
                f"{_SHARDS}: FSDP without a pipeline gathers each layer of "
                "tensor-parallel groups for every microbatch, but plans divide weights over single "
                "devices alone; set tensor_parallel_degree or data_parallel_shard_degree to 1"
            )
        return None
