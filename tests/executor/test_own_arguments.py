"""`train` from Python: what cannot be is refused with the name of the argument, the value, why."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from executor_plans import scheduled, zoo_pipeline
from torch import Tensor

from executor import train
from planner.errors import PipeplanError
from planner.plan.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [], ["d0"], 2))


def bytes_of(plan: Plan, samples: int, dtype: torch.dtype = torch.int64) -> Mapping[str, Tensor]:
    del plan
    ids = torch.zeros(samples, 64, dtype=dtype)
    return {"ids": ids, "target": ids}


@pytest.mark.extensive
def test_what_fits_trains_with_one_of_torchs_own_optimizers(plan: Plan) -> None:
    samples = plan.job.samples_per_microbatch
    history = train(
        plan,
        data=lambda step, microbatch: bytes_of(plan, samples),
        optimizer=torch.optim.SGD,
        optimizer_arguments={"momentum": 0.5},
        learning_rate=0.1,
        steps=3,
    )
    assert history[-1].loss < history[0].loss


def wrong_shape(plan: Plan) -> dict[str, object]:
    return {"data": lambda step, microbatch: bytes_of(plan, 7)}


def fails(plan: Plan) -> dict[str, object]:
    def nothing(step: int, microbatch: int) -> Mapping[str, Tensor]:
        raise KeyError("no such shard")

    return {"data": nothing}


REFUSED = {
    "shape": (
        wrong_shape,
        r"data <lambda>\(step=1, microbatch=0\): entry 'ids' is int64 \[7, 64\]",
    ),
    "none": (lambda plan: {"data": lambda s, m: None}, "returned a NoneType; expected the entries"),
    "fails": (fails, r"data nothing\(step=1, microbatch=0\) failed: KeyError: 'no such shard'"),
    "data": (lambda plan: {"data": 5}, "data: 5 is of type int; expected 'text', 'random', "),
    "device": (lambda plan: {"device": "tpu"}, "device: 'tpu'; expected 'cpu' or 'cuda'"),
    "timeout": (lambda plan: {"timeout_s": -1}, "timeout_s: -1; give from 1 to 1e"),
    "optimizer": (
        lambda plan: {"optimizer": torch.optim.Adagrad, "optimizer_arguments": {"speed": 1}},
        "optimizer 'Adagrad' with",
    ),
}


@pytest.mark.extensive
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_told(plan: Plan, case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(PipeplanError, match=message):
        train(plan, steps=1, **arguments(plan))


def test_a_path_is_no_plan() -> None:
    with pytest.raises(PipeplanError, match=r"plan: 'plan.json' is of type str, no plan; load one"):
        train("plan.json")
