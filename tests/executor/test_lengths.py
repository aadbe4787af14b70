"""Microbatches of several lengths run with real shapes, and train as a single process does."""

import json
from functools import cache

import pytest
import torch
from executor_plans import cut_pipeline, scheduled, shuffled
from launch import forked

from benchmarks.executor.parity import WITHIN
from benchmarks.executor.single_process import STEPS, TOLERANCE
from executor.launch.config import TrainingConfig
from executor.launch.prepare import prepare
from executor.launch.run import PlanRank
from executor.training.batches import batches
from executor.training.feed import Feed
from models import ZOO
from planner.errors import PipeplanError
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.plan import Plan
from planner.tracing.trace import trace

LENGTHS = {"tokens": (8, 24, 64), "shares": (0.4, 0.35, 0.25)}


@cache
def traced(name: str) -> LayerGraph:
    job = Job.model_validate({"samples_per_microbatch": 2, "lengths": LENGTHS})
    return trace(ZOO[name], job)


def chain() -> Plan:
    lengths = {**LENGTHS, "order": "longest_first"}
    fields = {"microbatches": 6, "lengths": lengths}
    graph, devices = traced("gpt_tiny"), ["d0", "d1", "d2"]
    return scheduled(cut_pipeline(graph, ZOO["gpt_tiny"], [4, 5], devices, **fields))


def replicas_that_recompute_and_split() -> Plan:
    trace = (5, 64, 20, 9, 40, 24, 8)
    lengths = {"tokens": LENGTHS["tokens"], "trace": trace}
    job = {"tokens": (8, 24, 64), "shares": (2 / 7, 3 / 7, 2 / 7)}
    assert [sum(a < n <= b for n in trace) for a, b in ((0, 8), (8, 24), (24, 64))] == [2, 3, 2]
    graph, devices = trace_of("llama_tiny", job), ["d0", "d1 d2"]
    fields = {"microbatches": 5, "lengths": lengths}
    placed = cut_pipeline(graph, ZOO["llama_tiny"], [2], devices, [1, 3], **fields)
    return shuffled(placed, 3, split=0.6)


def trace_of(name: str, lengths: dict) -> LayerGraph:
    return trace(ZOO[name], Job.model_validate({"samples_per_microbatch": 2, "lengths": lengths}))


PLANS = (chain, replicas_that_recompute_and_split)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plans")
    for build in PLANS:
        build().save(folder / f"{build.__name__}.json")
    run = forked(3, "-m", "benchmarks.executor.parity_worker", str(folder))
    assert run.returncode == 0, run.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in (folder / "report").iterdir()}


@pytest.mark.parametrize("name", [build.__name__ for build in PLANS])
def test_microbatches_of_several_lengths_train_as_a_single_process_does(
    reports: dict[str, dict], name: str
) -> None:
    report = reports[name]
    assert report["problems"] == []
    assert report["excess"] <= 1, report
    for error in WITHIN:
        assert report[error] <= TOLERANCE[report["precision"]], (error, report)


@pytest.mark.parametrize("build", PLANS)
def test_batches_have_the_lengths_that_the_plan_says(build) -> None:
    plan = build()
    prepared = prepare(plan, place=PlanRank(0, len(plan.ranks)))
    for source in ("random", "text"):
        batch_of = batches(source, prepared.model, plan.job, seed=1)
        seen = set()
        for step in range(1, STEPS + 1):
            lengths = plan.lengths_of(step)
            seen.update(lengths)
            for microbatch, tokens in enumerate(lengths):
                batch = batch_of(step, microbatch)
                assert {tuple(entry.shape) for entry in batch.values()} == {(2, tokens)}
        assert len(seen) == 3


def test_text_at_a_shorter_length_still_predicts_the_next_byte() -> None:
    plan = chain()
    prepared = prepare(plan, place=PlanRank(0, len(plan.ranks)))
    batch_of = batches("text", prepared.model, plan.job, seed=1)
    for microbatch in range(plan.microbatches):
        ids, target = batch_of(1, microbatch).values()
        assert torch.equal(ids[:, 1:], target[:, :-1])


def test_a_function_gives_batches_of_the_lengths_that_the_plan_says() -> None:
    plan = chain()
    prepared = prepare(plan, place=PlanRank(0, len(plan.ranks)))
    config = TrainingConfig.parse({"steps": 2}, "here")

    def of_tokens(tokens: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(2, tokens, dtype=torch.int64) for name in ("ids", "target")}

    feed = Feed(prepared, config, lambda step, m: of_tokens(plan.lengths_of(step)[m]), None, 1)
    for step in (1, 2):
        for microbatch, tokens in enumerate(plan.lengths_of(step)):
            assert feed.batch_of(step, microbatch)["ids"].shape == (2, tokens)
    shortest = plan.lengths_of(1).index(min(plan.lengths_of(1)))
    feed = Feed(prepared, config, lambda step, m: of_tokens(64), None, 1)
    with pytest.raises(PipeplanError, match=r"'ids' is int64 \[2, 64\]; expected int64 \[2, 8\]"):
        feed.batch_of(1, shortest)
    with pytest.raises(PipeplanError, match="3 lengths, but a map-style data set"):
        Feed(prepared, config, [of_tokens(64)] * 9, None, 1)


def test_a_model_with_running_statistics_is_refused() -> None:
    job = Job.model_validate(
        {
            "samples_per_microbatch": 2,
            "loss": "mse",
            "lengths": {"tokens": (4, 8), "shares": (0.5, 0.5)},
            "inputs": {
                "hidden": {"shape": (8, 3), "dtype": "float32"},
                "target": {"shape": (8, 3), "dtype": "float32"},
            },
        }
    )
    with pytest.raises(PipeplanError, match=r"norm\.num_batches_tracked.*several lengths"):
        trace(Normalised, job)


class Normalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.last = torch.nn.Linear(3, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(hidden).transpose(1, 2)).transpose(1, 2)
        return self.last(hidden)
