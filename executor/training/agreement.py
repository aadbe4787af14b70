"""What ranks have to agree on: the values that several of them hold, and the batches they read."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.checkpoint.ranks import Ranks
from executor.distributed.failure import talking_to
from executor.distributed.member_group import member_shares
from executor.launch.prepare import Prepared
from executor.sync.shared_parameters import make_process_groups, planned_split
from executor.training.batches import BatchOf
from planner.errors import PipeplanError
from planner.tracing.lookups import Lookup

logger = logging.getLogger(__name__)


@torch.no_grad()
def make_equal(prepared: Prepared, *, resumes: bool = False) -> None:
    """Give all ranks that hold a parameter or buffer the values of the first of them.

    Replicas and tied copies differ if the model draws by something else than torch's generator.
    Nothing is sent where they agree. DistributedDataParallel does the same with rank 0's values
    (Li et al. 2020, "PyTorch Distributed", section 3.1). All ranks call it together.

    Args:
        prepared: of this rank.
        resumes: whether parameters are read from a checkpoint next; buffers may not be in it.
    """
    held = _held(prepared, buffers_only=resumes)
    own = {key: _digest([tensor]) for key, tensor in held.items()}
    digests = [json.loads(text) for text in Ranks.of_process_group().gather(json.dumps(own))]
    holders: dict[str, list[int]] = {}
    for rank, row in enumerate(digests):
        for key in row:
            holders.setdefault(key, []).append(rank)
    differing = {
        key: tuple(ranks)
        for key, ranks in sorted(holders.items())
        if len({digests[rank][key] for rank in ranks}) > 1
    }
    groups = make_process_groups(differing.values()) if differing else {}
    for key, ranks in differing.items():
        if key in held:
            _broadcast(held[key], ranks, groups[ranks])
    if differing and dist.get_rank() == 0:
        logger.warning(
            "the model's initial values differ between ranks: %s; all ranks take those of the "
            "first one that holds them. For values that the seed determines, draw with the global "
            "generators of torch, numpy or random, or seed your own in the constructor",
            _first_of([key.partition("#")[0] for key in differing]),
        )


def _held(prepared: Prepared, *, buffers_only: bool) -> dict[str, Tensor]:
    """Return what this rank holds by a key that is one on all ranks with the same values."""
    plan, rank = prepared.plan, prepared.place.rank
    place = plan.place_of(rank)
    shares = member_shares(planned_split(plan, place.members), place.member)
    found: dict[str, Tensor] = {} if buffers_only else dict(prepared.parameters)
    for stage in prepared.stages:
        found.update(stage.buffers)
    return {f"{n}#{place.member}" if n in shares else n: tensor for n, tensor in found.items()}


def _broadcast(tensor: Tensor, ranks: tuple[int, ...], group: object) -> None:
    # As bytes, which every backend sends.
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    with talking_to(f"ranks {_first_of(ranks)}, which hold the same values"):
        dist.broadcast(raw, ranks[0], group=group)  # type: ignore[arg-type]
    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def _digest(tensors: Sequence[Tensor]) -> int:
    """Return 48 bits, which a float64 holds exactly."""
    found = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(raw.numpy().data)
    return int.from_bytes(found.digest(), "little")


def _first_of(names: Iterable[object], most: int = 10) -> str:
    """Return the first names in a sentence."""
    texts = [*map(str, names)]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


_FIRST, _EVERY = 8, 64
_NOT_READ, _READ_TWICE = -1.0, -2.0


class CheckedBatches:
    """Loads batches, refuses indices that the model cannot look up, and keeps digests.

    Ranks compare their digests of the first steps, and then of one in :data:`_EVERY`.

    Args:
        batch_of: returns the batch of a step and microbatch.
        limits: of the model's exported step.
        microbatches: of a step.
        first_step: that will be asked for.
    """

    def __init__(
        self, batch_of: BatchOf, limits: Sequence[Lookup], microbatches: int, first_step: int
    ) -> None:
        self._batch_of = batch_of
        self._limits = limits
        self._microbatches = microbatches
        self._first_step = first_step
        self._found: dict[tuple[int, int], float] = {}

    def __call__(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """Load a batch.

        Raises:
            PipeplanError: if it has an index that the model cannot look up.
        """
        batch = self._batch_of(step, microbatch)
        for limit in self._limits:
            if problem := limit.problem(batch):
                raise PipeplanError(
                    f"data: step {step}, microbatch {microbatch}: {problem}; correct the data, or "
                    "take a model with as many entries"
                )
        if self._is_checked(step):
            digest = float(_digest([batch[name] for name in sorted(batch)]))
            if self._found.setdefault((step, microbatch), digest) != digest:
                self._found[step, microbatch] = _READ_TWICE
        return batch

    def _is_checked(self, step: int) -> bool:
        return step < self._first_step + _FIRST or step % _EVERY == 0

    def take(self, step: int) -> list[float]:
        """Return a digest for each microbatch of a step, or nothing in a step without check."""
        if not self._is_checked(step):
            return []
        keys = [(step, microbatch) for microbatch in range(self._microbatches)]
        return [self._found.pop(key, _NOT_READ) for key in keys]


def require_same_batches(step: int, digests: Sequence[Sequence[float]]) -> None:
    """Refuse batches that differ between the ranks that read them.

    Args:
        step: of the batches.
        digests: of each microbatch, by rank.

    Raises:
        PipeplanError: naming the step, the first such microbatch, the ranks and the remedy.
    """
    for microbatch, row in enumerate(digests):
        read = {rank: digest for rank, digest in enumerate(row) if digest != _NOT_READ}
        if len(set(read.values())) > 1 or _READ_TWICE in read.values():
            who = "ranks" if len(read) > 1 else "the stages of rank"
            raise PipeplanError(
                f"data: step {step}, microbatch {microbatch}: {who} {_first_of(read)} read other "
                "batches, so that inputs and targets do not belong together; the data has to "
                "return the same batch for the same arguments on every rank: draw with the global "
                "generators of torch, numpy or random, which are seeded for each sample, or seed "
                "a generator of your own by the index"
            )
