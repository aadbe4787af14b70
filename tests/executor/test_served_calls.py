"""Which server a call goes to, and what it tells, when servers are lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from executor.elastic.tensor_calls import CallError, Header
from executor.sync.parameter_server import MOVES, ServedWeights
from executor.sync.parameter_shards import GradientShard


class Calls:
    """Calls to pipelines, some of which are gone.

    Attributes:
        made: pipelines that were called, with the headers.
    """

    def __init__(self, there: Mapping[int, int], gone: set[int]) -> None:
        self._there, self._gone = dict(there), gone
        self.made: list[tuple[int, Header]] = []

    def there(self) -> dict[int, int]:
        return dict(self._there)

    def there_without(self, pipeline: int, incarnation: int) -> dict[int, int]:
        assert self._there.pop(pipeline) == incarnation
        return dict(self._there)

    def call(self, pipeline: int, _: int, __: str, header: Header, ___: Any) -> tuple[Header, list]:
        self.made.append((pipeline, header))
        if pipeline in self._gone:
            raise CallError("gone")
        return {"from": pipeline}, []


def served(servers: int) -> ServedWeights:
    masters = {name: nn.Parameter(torch.zeros(2)) for name in "ab"}
    neighbours: Any = SimpleNamespace(
        optimisation=SimpleNamespace(weights=SimpleNamespace(masters=masters)),
        server=SimpleNamespace(handle=lambda *_: None),
        timeout_s=300.0,
        there={5: 1},
    )

    def sgd(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters.values(), lr=1.0)

    return ServedWeights(neighbours, lambda _, mine: GradientShard(mine, sgd), servers)


def told(calls: Calls) -> Iterator[tuple[object, ...]]:
    for pipeline, header in calls.made:
        yield pipeline, header["part"], header["elders"], header.get("members")


def test_a_call_goes_to_the_next_server_with_the_members_that_are_left() -> None:
    calls = Calls({3: 2, 0: 1, 1: 4}, gone={3})
    header = {"group": 7, "pipeline": 1, "members": {0: 1, 1: 4, 3: 2}}
    answer, _ = served(1).call(calls, 0, "push", header)  # type: ignore[arg-type]
    assert answer == {"from": 0}
    everybody = [[0, 1], [1, 4], [3, 2]]
    assert list(told(calls)) == [(3, 0, [], everybody), (0, 0, [], everybody[:2])]
    first, second = (header["patience_s"] for _, header in calls.made)
    assert second <= first <= 0.75 * 300


def test_parts_are_on_the_pipelines_that_have_been_there_for_longest() -> None:
    calls = Calls({3: 2, 0: 1, 1: 4}, gone=set())
    for part in (0, 1):
        served(2).call(calls, part, "pull", {})  # type: ignore[arg-type]
    assert list(told(calls)) == [(3, 0, [], None), (0, 1, ["3.2"], None)]


def test_a_call_fails_where_nobody_is_left_or_servers_keep_ending() -> None:
    with pytest.raises(CallError, match="nobody takes part"):
        served(1).call(Calls({}, gone=set()), 0, "pull", {})  # type: ignore[arg-type]
    calls = Calls(dict.fromkeys(range(9), 1), gone=set(range(9)))
    with pytest.raises(CallError, match="gone"):
        served(1).call(calls, 0, "pull", {})  # type: ignore[arg-type]
    assert len(calls.made) == MOVES
