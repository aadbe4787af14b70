"""Process groups among ranks of different pipelines, made when they are needed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executor.coordinator.client import GroupAssignment
from executor.coordinator.groups import keep
from executor.coordinator.pipelines import Incarnations
from executor.distributed.host_tuning import let_others_finish
from planner.tracing.torch_private import GlooDevice, gloo_device, gloo_group

_LOOK = timedelta(seconds=0.1)
"""Time between two looks at who is there, while members are waited for."""
_POLL_S = 0.002


class DynamicGroups:
    """Sums tensors over members that the coordinator names, over gloo.

    A group that failed is never used again: a collective that timed out leaves its connections in
    no known state. So each set of members has its own, and the pipelines' messages have others.
    A member that the coordinator has given up is not waited for, neither in a reduction nor while
    connections are made, which gloo itself goes on trying for up to 10 s.

    Args:
        connect: makes a connection to the store where members meet.
        there: returns the incarnations of the pipelines that take part now, by number.
        pipeline, place: of this rank.
        host: address of this rank's connections.
        timeout_s: of a member that does not come, or stops within.
        before_reduction: called when a reduction is about to begin, which others may have begun.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        there: Callable[[], Mapping[int, int]],
        pipeline: int,
        place: int,
        host: str,
        timeout_s: float,
        before_reduction: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect = connect
        self._store = connect()
        self._there = there
        self._pipeline = pipeline
        self._place = place
        self._timeout = timedelta(seconds=timeout_s)
        self._device: GlooDevice = gloo_device(host)
        self._kept: OrderedDict[Incarnations, None] = OrderedDict()
        self._made: dict[Incarnations, tuple[int, Any]] = {}
        # Groups whose reductions are not waited for any more, and until when these may run: ending
        # a process group waits for its reductions.
        self._left: list[tuple[float, Any]] = []
        self._before_reduction = before_reduction

    def mean(self, group: GroupAssignment, tensors: Sequence[Tensor]) -> bool:
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
        self._left = [row for row in self._left if row[0] > time.monotonic()]
        try:
            made = self._group_of(group)
            sums = [tensor.cpu() if tensor.is_cuda else tensor.clone() for tensor in tensors]
            self._before_reduction()
            for work in [made.allreduce([total]) for total in sums]:
                self._wait(work, group.members)
        except (RuntimeError, ConnectionError):
            left = self._made.pop(group.members, None)
            if left is not None:
                self._left.append((time.monotonic() + 2 * self._timeout.total_seconds(), left[1]))
            return False
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.div_(len(group.members)))
        return True

    def _group_of(self, group: GroupAssignment) -> Any:
        for dropped in keep(self._kept, group.members):
            self._made.pop(dropped, None)
        generation, made = self._made.get(group.members, (-1, None))
        if generation != group.generation:
            self._made.pop(group.members, None)
            made = self._make(group)
            self._made[group.members] = group.generation, made
        return made

    def _wait(self, work: Any, members: Incarnations) -> None:
        """Wait for a reduction, as long as all members take part."""
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if not work.is_completed():
                    self._require_all(members)
        work.wait()

    def _require_all(self, members: Incarnations) -> None:
        there = self._there()
        gone = [number for number, incarnation in members if there.get(number) != incarnation]
        if gone:
            raise ConnectionError(f"pipelines {gone} are given up")

    def _meet(self, store: Store, rank: int, members: Incarnations) -> None:
        """Wait until all members are about to make their group."""
        store.set(f"at/{rank}", "")
        names = [f"at/{number}" for number in range(len(members))]
        until_s = time.monotonic() + self._timeout.total_seconds()
        while not store.check(names):
            if time.monotonic() > until_s:
                raise ConnectionError("a member did not come")
            self._require_all(members)
            time.sleep(_POLL_S)

    def _make(self, group: GroupAssignment) -> Any:
        names = ",".join(f"{number}.{incarnation}" for number, incarnation in group.members)
        prefix = f"group/{self._place}/{names}/{group.generation}"
        rank = [number for number, _ in group.members].index(self._pipeline)
        store = PrefixStore(prefix, self._store)
        self._meet(store, rank, group.members)
        making = _on_a_thread(
            partial(gloo_group, store, rank, len(group.members), self._timeout, self._device)
        )
        try:
            self._await(making, group.members)
        except ConnectionError:
            # The thread may keep the connection for as long as gloo tries.
            self._store = self._connect()
            raise
        made = making.result()
        let_others_finish()
        return made

    def _await(self, making: Future[Any], members: Incarnations) -> None:
        """Wait until a group is made, as long as all members take part."""
        until_s = time.monotonic() + self._timeout.total_seconds()
        while not wait([making], _LOOK.total_seconds()).done:
            self._require_all(members)
            if time.monotonic() > until_s:
                raise ConnectionError("a member did not connect")


def _on_a_thread(make: Callable[[], Any]) -> Future[Any]:
    """Return what comes of a call that may be left alone, even at the end of the program."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(make())
        except Exception as error:
            found.set_exception(error)

    Thread(target=run, name="pipeplan-group", daemon=True).start()
    return found
