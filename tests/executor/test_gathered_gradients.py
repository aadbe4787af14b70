"""A server's wait for the gradients of a group: who is waited for, and what comes too late."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from executor.elastic.tensor_calls import Header
from executor.sync.parameter_shards import GradientShard

LONG_S = 300.0


def sgd(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters.values(), lr=1.0)


def shard(after_group: int = -1) -> GradientShard:
    return GradientShard({"w": nn.Parameter(torch.zeros(2))}, sgd, after_group)


def header(pipeline: int, members: Mapping[int, int], group: int = 4) -> Header:
    pairs = [[number, incarnation] for number, incarnation in members.items()]
    return {"group": group, "pipeline": pipeline, "members": pairs, "rates": [1.0]}


def pushed(
    pool: ThreadPoolExecutor, to: GradientShard, pipeline: int, members: Mapping[int, int]
) -> Future[tuple[Header, list[torch.Tensor]]]:
    """Push a gradient of 1, 2, 4, ... by pipeline on a thread of its own, and see it arrive."""
    gradients = [torch.full((2,), 2.0**pipeline)]
    before = len(to._gathered[4].rows) if to else 0
    future = pool.submit(to.push, header(pipeline, members), gradients, LONG_S)
    while not future.done() and len(to._gathered[4].rows if 4 in to._gathered else ()) == before:
        time.sleep(0.001)
    return future


def value(found: list[torch.Tensor]) -> float:
    return float(found[0][0])


def test_a_server_waits_no_more_for_a_member_that_is_given_up() -> None:
    members = {0: 1, 1: 3, 2: 1}
    kept = shard()
    with ThreadPoolExecutor(2) as pool:
        answers = [pushed(pool, kept, pipeline, members) for pipeline in (0, 2)]
        assert kept
        kept.end_all_but({0: 1, 1: 3, 2: 1})
        assert not any(answer.done() for answer in answers)
        kept.end_all_but({0: 1, 2: 1, 1: 4})
        for answer in answers:
            assert value(answer.result(LONG_S)[1]) == -(1 + 4) / 2
    assert not kept


def test_whoever_turns_here_from_a_lost_server_tells_who_is_left() -> None:
    kept = shard()
    with ThreadPoolExecutor(1) as pool:
        first = pushed(pool, kept, 0, {0: 1, 1: 1, 2: 1})
        _, weights = kept.push(header(1, {0: 1, 1: 1}), [torch.full((2,), 2.0)], LONG_S)
        assert value(weights) == -1.5
        assert first.result(LONG_S)[0]["version"] == 1


def test_gradients_that_come_after_their_group_change_nothing() -> None:
    members = {0: 1, 1: 1}
    kept = shard()
    _, weights = kept.push(header(0, members), [torch.ones(2)], 0.0)
    assert value(weights) == -1.0
    late, weights = kept.push(header(1, members), [torch.ones(2)], LONG_S)
    assert late == {"left_out": True, "version": 1}
    assert value(weights) == -1.0


def test_a_new_server_takes_no_step_again_that_it_has_had_from_the_last() -> None:
    kept = shard(after_group=4)
    told, weights = kept.push(header(1, {0: 1, 1: 1}), [torch.ones(2)], LONG_S)
    assert told["left_out"]
    assert value(weights) == 0.0
    told, weights = kept.push(header(1, {1: 1}, group=5), [torch.ones(2)], LONG_S)
    assert "left_out" not in told
    assert value(weights) == -1.0
