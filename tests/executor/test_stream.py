"""Iterable data sets: all ranks read the same samples, and a resumed training the next ones."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from executor_plans import pipeline_of, scheduled, traced
from run_files import RunFiles
from torch import Tensor
from torch.utils.data import DataLoader
from user_code import Lines, lines

from executor.checkpoint import Checkpoint
from executor.training.feed import open_data
from executor.training.samples import StreamBatches
from models import ZOO
from planner.errors import PipeplanError
from planner.plan.plan import Plan

EXAMPLE = {name: torch.zeros(2, 64, dtype=torch.int64) for name in ("ids", "target")}
MICROBATCHES = 3
KINDS: dict[str, Callable[[], Any]] = {
    "generator function": lambda: lines,
    "data set": Lines,
    "named function": lambda: "user_code:lines",
    "named class": lambda: "user_code:Lines",
}


def batches(data: object, **where: object) -> StreamBatches:
    return StreamBatches(open_data(data, {}), EXAMPLE, MICROBATCHES, 7, **where)


def taken(found: StreamBatches, steps: range, order: range = range(MICROBATCHES)) -> list[Tensor]:
    rows = {(step, m): found(step, m)["ids"] for step in steps for m in order}
    return [rows[key] for key in sorted(rows)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(a.equal(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_come_in_their_order_pass_after_pass_on_any_rank(kind: str) -> None:
    first = taken(batches(KINDS[kind]()), range(1, 9))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    last = taken(batches(KINDS[kind]()), range(1, 9), range(MICROBATCHES - 1, -1, -1))
    assert equal(first, last)
    assert torch.get_rng_state().equal(before)
    assert equal(taken(batches(lines), range(1, 9)), first)
    a_replica = batches(KINDS[kind]())
    assert equal([a_replica(step, 2)["ids"] for step in range(1, 9)], first[2::3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_training_reads_the_next_samples(kind: str, stop: int) -> None:
    whole = taken(batches(KINDS[kind]()), range(1, 9))
    first = batches(KINDS[kind]())
    found = taken(first, range(1, stop + 1))
    state, seen = first.state_after(stop), first.samples_seen_after(stop)
    assert (state is not None) == (kind in ("data set", "named class"))
    Lines.read = 0
    for going_on in (state, None):
        second = batches(KINDS[kind](), samples_seen=seen, first_step=stop + 1, state=going_on)
        assert equal(found + taken(second, range(stop + 1, 9)), whole)
        if going_on is not None:
            assert Lines.read == (8 - stop) * MICROBATCHES * 2


def endless() -> Iterator[int]:
    return iter(())


REFUSED = {
    "iterator": (lambda: lines(), "an iterator can be read only once, and restarts read it again"),
    "loader": (lambda: DataLoader([1, 2]), "a DataLoader makes batches of its own"),
    "set": (lambda: {1, 2}, "is of type set; expected 'text', 'random', module:factory, a map"),
    "number": (lambda: 3, "data: 3 is of type int; expected"),
    "empty": (lambda: "test_stream:endless", "a pass has no sample"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_again_is_refused_with_what_can(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(PipeplanError, match=message):
        batches(data())(1, 0)


def test_a_step_that_was_read_past_is_refused() -> None:
    found = batches(lines)
    found(3, 0)
    with pytest.raises(PipeplanError, match="step 1 was read past, and a stream is read in order"):
        found(1, 0)


def plan_of(stages: int) -> Plan:
    graph = traced("gpt_tiny")
    layers = list(graph.layers)
    rows = [(layers[:4], ["d0"]), (layers[4:], ["d1"])]
    if stages == 3:
        rows = [(layers[:3], ["d1"]), (layers[3:], ["d0"])]
    return scheduled(pipeline_of(graph, ZOO["gpt_tiny"], rows, microbatches=4))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("streams"), 6)
    for name in ("lines", "Lines"):
        data = f"user_code:{name}"
        found.add(f"{name}_1", plan_of(2), data=data, every=3)
        resume = str(found.checkpoints(f"{name}_1") / "step-00000003")
        found.add(f"{name}_2", plan_of(3), data=data, resume=resume)
    found.launch(2)
    return found


@pytest.mark.parametrize("name", ["lines", "Lines"])
def test_streams_train_and_resume_under_another_plan(runs: RunFiles, name: str) -> None:
    whole, resumed = runs.losses(f"{name}_1"), runs.losses(f"{name}_2")
    assert resumed == pytest.approx(whole[3:], rel=1e-6)
    facts = Checkpoint.open(runs.checkpoints(f"{name}_1") / "step-00000003").facts
    expected = {"passes": 1, "state": {"place": 3}} if name == "Lines" else None
    assert facts["data_state"] == expected
    assert list(islice(runs.losses("lines_1"), 3)) == runs.losses("Lines_1")[:3]
