"""Process groups among ranks of different pipelines, made when they are needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executor.coordinator.client import AGroup
from executor.coordinator.generations import Lives, keep
from executor.gloo_threads import let_others_finish
from planner.tracing.torch_private import GlooDevice, gloo_device, gloo_group


class Groups:
    """Sums tensors over members that the coordinator names, over gloo.

    A group that failed is never used again: a collective that timed out leaves its connections in
    no known state. So each set of members has its own, and the pipelines' messages have others.

    Args:
        store: where members meet; a connection of its own.
        pipeline, place: of this rank.
        host: address of this rank's connections.
        timeout_s: of a member that does not come, or stops within.

    Attributes:
        under_way: called when a reduction is about to begin, which others may have begun.
    """

    def __init__(
        self, store: Store, pipeline: int, place: int, host: str, timeout_s: float
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._place = place
        self._timeout = timedelta(seconds=timeout_s)
        self._device: GlooDevice = gloo_device(host)
        self._kept: OrderedDict[Lives, None] = OrderedDict()
        self._made: dict[Lives, tuple[int, Any]] = {}
        self.under_way: Callable[[], None] = lambda: None

    def mean(self, group: AGroup, tensors: Sequence[Tensor]) -> bool:
        """Replace tensors by their mean over the members.

        Args:
            group: of the coordinator's; members call this in its order.
            tensors: as long and of the same types at all members.

        Returns:
            Whether it succeeded. If not, the tensors are as they were here, and may be averaged
            at other members.
        """
        if len(group.members) < 2:
            return True
        try:
            made = self._group_of(group)
            sums = [tensor.cpu() if tensor.is_cuda else tensor.clone() for tensor in tensors]
            self.under_way()
            for work in [made.allreduce([total]) for total in sums]:
                work.wait()
        except (RuntimeError, ConnectionError):
            self._made.pop(group.members, None)
            return False
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.div_(len(group.members)))
        return True

    def _group_of(self, group: AGroup) -> Any:
        for dropped in keep(self._kept, group.members):
            self._made.pop(dropped, None)
        generation, made = self._made.get(group.members, (-1, None))
        if generation != group.generation:
            self._made.pop(group.members, None)
            made = self._make(group)
            self._made[group.members] = group.generation, made
        return made

    def _make(self, group: AGroup) -> Any:
        names = ",".join(f"{number}.{life}" for number, life in group.members)
        prefix = f"group/{self._place}/{names}/{group.generation}"
        rank = [number for number, _ in group.members].index(self._pipeline)
        store = PrefixStore(prefix, self._store)
        made = gloo_group(store, rank, len(group.members), self._timeout, self._device)
        let_others_finish()
        return made
