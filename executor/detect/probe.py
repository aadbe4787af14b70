"""Timing messages and all-reduces of one rank, over whatever its tensors travel by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.detect.options import MeasurementOptions
from executor.detect.turns import Flow
from executor.distributed.failure import talking_to
from planner.errors import PipeplanError
from planner.topology.measurements import fit_one_way

SHORT_BYTES = 8
"""Bytes of the shortest message, and of every answer."""
SHORT_REPEATS = 30
FIRST_BYTES = 2**16
ROUNDS = 6
"""Rounds of concurrent flows; the first is not counted."""
ATTEMPTS = 4
"""Attempts to measure a way of which nothing can be concluded."""
_GROWTH = 4
_WARM_UP = 3
_LATE_S = 0.05
"""Short messages that take this long are repeated less often."""
_WORD = torch.int64


class Probe:
    """This rank's part in all turns.

    Args:
        device: of its tensors.
        backend: of torch.distributed; gloo takes tensors of a GPU by way of the CPU.
        options: how often and how long messages are.
    """

    def __init__(self, device: torch.device, backend: str, options: MeasurementOptions) -> None:
        self._device = device
        self._is_staged = device.type == "cuda" and backend == "gloo"
        self._repeats = options.repeats
        self._most_bytes = options.most_bytes
        self._enough_s = options.longest_ms * 1e-3
        self._of_equal = options.of_equal
        self._worth: dict[int, int] = {}
        self.rank = dist.get_rank()

    # --- one pair -------------------------------------------------------------------------------

    def ask(self, peer: int) -> dict[int, list[float]]:
        """Send messages of several sizes that :meth:`answer` answers.

        Returns:
            Seconds until each answer was here, by the message's bytes.
        """
        with talking_to(f"rank {peer}, which answers messages"):
            self._trips(peer, SHORT_BYTES, _WARM_UP)
            for _ in range(ATTEMPTS):
                found = self._sizes(peer)
                if self._tells(found):
                    break
            self._send_word(peer, (0, 0))
        self._worth[peer] = max(found)
        return found

    def _sizes(self, peer: int) -> dict[int, list[float]]:
        (first_s,) = self._trips(peer, SHORT_BYTES, 1)
        short_s = self._trips(peer, SHORT_BYTES, SHORT_REPEATS if first_s < _LATE_S else _WARM_UP)
        most = self._enough(peer, median(short_s))
        found = {SHORT_BYTES: short_s}
        for bytes_ in dict.fromkeys((_whole(most / 4), _whole(most / 2), most)):
            self._trips(peer, bytes_, 1)
            found[bytes_] = self._trips(peer, bytes_, self._repeats)
        return found

    def _tells(self, found: dict[int, list[float]]) -> bool:
        """Return whether longer messages took longer; on a shared machine they may not have."""
        try:
            fit_one_way("here", "there", found, self._of_equal)
        except PipeplanError:
            return False
        return True

    def answer(self, peer: int) -> None:
        """Answer all messages of a rank."""
        with talking_to(f"rank {peer}, which sends messages"):
            while True:
                bytes_, repeats = self._receive_word(peer)
                if not repeats:
                    return
                buffer, word = self._empty(bytes_), self._empty(SHORT_BYTES)
                for _ in range(repeats):
                    self._exchange([], [(buffer, peer)])
                    self._exchange([(word, peer)], [])

    def _trips(self, peer: int, bytes_: int, repeats: int) -> list[float]:
        self._send_word(peer, (bytes_, repeats))
        message, word = self._empty(bytes_), self._empty(SHORT_BYTES)
        seconds = []
        for _ in range(repeats):
            start_s = self._now_s()
            # The answer is waited for from the start, as a rank in training waits for a tensor.
            self._exchange([(message, peer)], [(word, peer)])
            seconds.append(self._now_s() - start_s)
        return seconds

    def _enough(self, peer: int, short_s: float) -> int:
        """A size worth the time that a message may take on this way, or the largest."""
        bytes_ = min(FIRST_BYTES, self._most_bytes)
        while True:
            moving_s = min(self._trips(peer, bytes_, 2)) - short_s
            if moving_s >= self._enough_s / _GROWTH or bytes_ >= self._most_bytes:
                break
            bytes_ = min(bytes_ * _GROWTH, self._most_bytes)
        wanted = bytes_ * self._enough_s / max(moving_s, 1e-9)
        # A message that hung once says little of the way; it may cost precision, not hours.
        return _whole(min(max(wanted, FIRST_BYTES / _GROWTH), self._most_bytes))

    # --- flows at the same time -----------------------------------------------------------------

    def flow(self, flows: Sequence[Flow]) -> dict[int, tuple[int, list[float]]]:
        """Take part in flows at the same time.

        Returns:
            For each source that sends to this rank, its messages' bytes and the seconds of each
            round after the first.
        """
        targets = [target for source, target in flows if source == self.rank]
        sources = [source for source, target in flows if target == self.rank]
        with talking_to("ranks that exchange messages at the same time"):
            sizes = self._agreed_sizes(targets, sources)
            sends = [(self._empty(self._size(peer)), peer) for peer in targets]
            receives = [(self._empty(sizes[peer]), peer) for peer in sources]
            moments = []
            for _ in range(ROUNDS):
                self._exchange(sends, receives)
                moments.append(self._now_s())
        spans = [b - a for a, b in pairwise(moments)]
        return {peer: (sizes[peer], spans) for peer in sources}

    def _size(self, peer: int) -> int:
        """Worth about the same time on every way; the pairs were measured before."""
        return self._worth.get(peer, min(FIRST_BYTES * _GROWTH, self._most_bytes))

    def _agreed_sizes(self, targets: Sequence[int], sources: Sequence[int]) -> dict[int, int]:
        said = [(self._word((self._size(peer), 0)), peer) for peer in targets]
        heard = [(self._word((0, 0)), peer) for peer in sources]
        self._exchange(said, heard)
        return {peer: int(word[0]) for word, peer in heard}

    # --- messages beside computation -------------------------------------------------------------

    def exchange_while(
        self, peer: int, work: Callable[[Callable[[], bool]], None], *, leads: bool
    ) -> list[float]:
        """Exchange messages with a rank that does the same while both work.

        Args:
            peer: the other rank.
            work: is called meanwhile, with what says whether messages still move.
            leads: whether messages end with this rank's work; else its work should with them.

        Returns:
            Seconds of each exchange, a message there and one back at the same time, but for the
            first and the last, in which there is not all of the work.
        """
        done, moments = Event(), [time.perf_counter()]

        def exchange() -> None:
            with self._own_stream():
                while not self._exchange_both_ways(peer, is_last=leads and done.is_set()):
                    moments.append(time.perf_counter())

        whom = f"rank {peer}, with which it exchanges messages while it computes"
        with talking_to(whom), ThreadPoolExecutor(1) as pool:
            running = pool.submit(exchange)
            try:
                work(lambda: not running.done())
            finally:
                done.set()
            running.result()
        return [b - a for a, b in pairwise(moments[1:])]

    def _exchange_both_ways(self, peer: int, *, is_last: bool) -> bool:
        """Send and receive a message of the same size, and whether it was the last for either."""
        (size,) = self._agreed_sizes([peer], [peer]).values()
        bytes_ = _whole(min(self._size(peer), size, self._most_bytes) / 2)
        sent, heard = self._empty(bytes_), self._empty(bytes_)
        said, told = self._word((int(is_last), 0)), self._word((0, 0))
        self._exchange([(sent, peer), (said, peer)], [(heard, peer), (told, peer)])
        return is_last or bool(told[0])

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Keep what a thread exchanges off the stream on which another computes."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            yield

    # --- all-reduces ----------------------------------------------------------------------------

    def reduce(self, group: Any, leader: int, size: int) -> dict[int, list[float]]:
        """All-reduces of several sizes among the ranks of a group.

        Args:
            group: of torch.distributed.
            leader: its first rank, whose clock decides on sizes.
            size: number of its ranks.

        Returns:
            Seconds of this rank, by bytes.
        """
        with talking_to(f"the {size} ranks of an all-reduce"):
            bytes_ = min(FIRST_BYTES, self._most_bytes)
            while True:
                taken_s = min(self._reductions(group, bytes_, 2))
                word = self._word((int(taken_s * 1e9), 0))
                dist.broadcast(word, leader, group=group)
                if int(word[0]) >= self._enough_s / 2 * 1e9 or bytes_ >= self._most_bytes:
                    break
                bytes_ = min(bytes_ * _GROWTH, self._most_bytes)
            sizes = dict.fromkeys((_whole(FIRST_BYTES / 16), _whole(bytes_ / 8), bytes_))
            return {size: self._reductions(group, size, self._repeats) for size in sizes}

    def _reductions(self, group: Any, bytes_: int, repeats: int) -> list[float]:
        tensor = torch.zeros(bytes_ // 4, device=self._device)
        word = torch.zeros(1, device=self._device)
        dist.all_reduce(tensor, group=group)
        seconds = []
        for _ in range(repeats):
            dist.all_reduce(word, group=group)  # So that all begin together.
            start_s = self._now_s()
            dist.all_reduce(tensor, group=group)
            seconds.append(self._now_s() - start_s)
        return seconds

    # --- messages -------------------------------------------------------------------------------

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send and receive at the same time, to the end."""
        staged = [(tensor.cpu() if self._is_staged else tensor, peer) for tensor, peer in sends]
        landed = [
            (torch.empty_like(tensor, device="cpu") if self._is_staged else tensor, peer)
            for tensor, peer in receives
        ]
        operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in landed]
        operations += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in staged]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for (tensor, _), (copy, _) in zip(receives, landed, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    def _empty(self, bytes_: int) -> Tensor:
        return torch.zeros(bytes_, dtype=torch.uint8, device=self._device)

    def _word(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=_WORD, device=self._device)

    def _send_word(self, peer: int, values: Sequence[int]) -> None:
        self._exchange([(self._word(values), peer)], [])

    def _receive_word(self, peer: int) -> tuple[int, int]:
        word = self._word((0, 0))
        self._exchange([], [(word, peer)])
        bytes_, repeats = word.tolist()
        return bytes_, repeats

    def _now_s(self) -> float:
        """Once everything asked of the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _whole(bytes_: float) -> int:
    """A size that float32 and 64-bit words divide."""
    return max(int(bytes_) // 8 * 8, 2 * SHORT_BYTES)
