"""How ranks open what they talk over, and how arrivals are noted where waits are a stream's."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import executor.runtime.transport
from executor.distributed.machines import BACKENDS
from executor.distributed.process_group import carrier_of
from executor.runtime.transport import Transport, make_channels, open_communicators
from executor.runtime.worker import TensorSpec
from planner.verification.issue_order import Communicator

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Streams:
    """Streams of a GPU as names; a mark is what the current one waits for."""

    def __init__(self) -> None:
        self.current = "compute"
        self.waits: dict[str, list[str]] = {"compute": []}

    @contextmanager
    def beside(self, peer: int) -> Iterator[None]:
        self.current = f"beside {peer}"
        self.waits.setdefault(self.current, [])
        yield
        self.current = "compute"

    def mark(self) -> tuple[str, ...]:
        return (self.current, *self.waits[self.current])


class Waited:
    """A receive of NCCL's, for which the current stream waits."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.streams = name, streams

    def wait(self) -> None:
        self.streams.waits[self.streams.current].append(self.name)


def test_a_watched_receive_holds_up_no_computation_before_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, names = Streams(), iter(["3.1", "3.2"])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:nccl")
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: Waited(next(names), streams))
    monkeypatch.setattr(executor.runtime.transport, "CudaStreams", lambda device: streams)
    watched = Transport(CPU, {}, watches=True)
    first, second = (watched.receive(TensorSpec((1,), torch.float32), 3) for _ in range(2))
    assert streams.waits["compute"] == []
    assert first.arrived == ("beside 3", "3.1")
    assert second.arrived == ("beside 3", "3.1", "3.2")
    watched.received(first)
    assert streams.waits["compute"] == ["3.1"]


class Over:
    """What opening a communicator waits for."""

    def wait(self) -> None:
        pass


class Work:
    """A send of gloo's, which is over when the receiver has it, and knows so once waited for."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        self.arrived.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """What every send of a rank on gloo gives."""
    found = Work()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:gloo")
    monkeypatch.setattr(dist, "isend", lambda tensor, peer, group=None: found)
    return found


def until(what: Callable[[], bool]) -> None:
    for _ in range(500):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that within 5 s")


def test_a_sent_tensor_goes_when_it_has_arrived(work: Work) -> None:
    tensor, transport = torch.zeros(3), Transport(CPU, {})
    held, sending = weakref.ref(tensor), transport.send(tensor, 1)
    del tensor
    assert not sending.is_over
    assert held() is not None
    work.arrived.set()
    until(lambda: sending.is_over)
    sending.wait()
    assert held() is None


def test_a_send_that_fails_is_not_over_and_says_so_who_waits(work: Work) -> None:
    work.error = RuntimeError("connection reset by peer")
    work.arrived.set()
    transport = Transport(CPU, {})
    sending = transport.send(torch.zeros(3), 1)
    with pytest.raises(RuntimeError, match="reset by peer"):
        sending.wait()
    assert not sending.is_over


def test_all_ranks_open_the_same_communicators_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [(0, 1), (1, 0), (1, 2), (2, 1)]
    groups = {(0, 1): "g01", (0, 1, 2): "g012"}
    opened: list[list[Communicator]] = []
    for rank in range(3):
        calls: list[Communicator] = []

        class Noting:
            def send(self, tensor: Tensor, peer: int, rank=rank, calls=calls) -> Over:
                calls.append(Communicator("messages", (rank, peer)))
                return Over()

            def receive(self, spec: TensorSpec, peer: int, rank=rank, calls=calls) -> Over:
                calls.append(Communicator("messages", (peer, rank)))
                return Over()

        def all_reduce(tensor: Tensor, group: str | None = None, calls=calls) -> None:
            named = {name: ranks for ranks, name in groups.items()}
            calls.append(Communicator("reductions", named[group] if group else (0, 1, 2, 99)))

        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        open_communicators(Noting(), ends, groups, CPU)
        opened.append([c for c in calls if 99 not in c.ranks])
    for one, other in combinations(opened, 2):
        assert [c for c in one if c in other] == [c for c in other if c in one]
    expected = [Communicator("messages", pair) for pair in ends]
    expected += [Communicator("reductions", ranks) for ranks in groups]
    for rank, row in enumerate(opened):
        assert sorted(row) == sorted(c for c in expected if rank in c.ranks)


@pytest.mark.parametrize(("named", "on_gpu"), [("gloo", "gloo"), ("nccl", "nccl")])
def test_tensors_of_the_cpu_go_over_gloo_whatever_backend_is_named(
    monkeypatch: pytest.MonkeyPatch, named: str, on_gpu: str
) -> None:
    whole = BACKENDS[named] if ":" in BACKENDS[named] else f"cpu:{named},cuda:{named}"
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: whole)
    assert carrier_of(CPU) == "gloo"
    assert carrier_of(GPU) == on_gpu


def test_each_direction_has_a_group_of_its_own_under_nccl_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[list[int], str]] = []

    def new_group(ranks: list[int], timeout: object, backend: str) -> None:
        made.append((ranks, backend))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: BACKENDS["nccl"])
    ends = [(0, 1), (1, 0)]
    assert list(make_channels(ends, GPU)) == ends
    assert made == [([0, 1], "nccl"), ([1, 0], "nccl")]
    assert make_channels(ends, CPU) == {}
