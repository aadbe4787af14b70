"""Learning-rate schedules against torch's own schedulers."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from executor.training.optimisation import custom_schedule, known_schedule, set_learning_rate
from planner.errors import PipeplanError

STEPS = st.integers(1, 40)
RATE = 0.3


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)


def rates_of_torch(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@given(STEPS, st.floats(0, 1))
def test_courses_after_the_warm_up_are_torchs(steps: int, final: float) -> None:
    """Torch's step 0 has the first rate; it is our step 1's predecessor."""
    cosine = lr_scheduler.CosineAnnealingLR(optimizer(), steps, eta_min=RATE * final)
    line = lr_scheduler.LinearLR(optimizer(), 1.0, final, steps)
    for kind, scheduler in (("cosine", cosine), ("linear", line)):
        expected = rates_of_torch(scheduler, steps + 1)[1:]
        schedule = known_schedule(kind, steps, final_factor=final)
        found = [RATE * schedule(step) for step in range(1, steps + 1)]
        assert found == pytest.approx(expected, abs=1e-9)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    STEPS.flatmap(lambda steps: st.tuples(st.just(steps), st.integers(0, steps))),
    st.floats(0, 1),
)
def test_the_rate_rises_in_the_warm_up_and_never_again(
    kind: str, steps: tuple[int, int], final: float
) -> None:
    total, warmup = steps
    schedule = known_schedule(kind, total, warmup, final)
    factors = [schedule(step) for step in range(1, total + 3)]
    assert factors[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    rest = factors[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 for a, b in pairwise(rest))
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else final)
    assert all(0 < factor <= 1 or (factor == 0 and final == 0) for factor in factors)


def test_every_group_keeps_its_own_rate() -> None:
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))]},
        {"params": [nn.Parameter(torch.zeros(1))], "lr": 3.0},
        {"params": [nn.Parameter(torch.zeros(1))], "lr": torch.tensor(2.0)},
    ]
    trained = torch.optim.AdamW(groups, lr=1.0, foreach=False)
    tensor = trained.param_groups[2]["lr"]
    for factor in (0.5, 0.25):
        set_learning_rate(trained, factor)
        assert [float(group["lr"]) for group in trained.param_groups] == [
            factor,
            3 * factor,
            2 * factor,
        ]
    assert trained.param_groups[2]["lr"] is tensor  # A captured graph reads this very tensor.


SOURCE = """
def halves(step):
    return 0.5**step

def fails(step):
    raise KeyError("no rate")

def text(step):
    return "fast"

def negative(step):
    return -1.0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rates_for_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "rates_for_a_test"


def test_a_schedule_of_the_users_own(own: str) -> None:
    assert [custom_schedule(f"{own}:halves")(step) for step in (1, 2)] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"failed in step 4: KeyError: 'no rate' \(.*rates_for_a_test.py:6\)"),
        ("text", "returned 'fast' for step 4; expected a finite number"),
        ("negative", "returned -1.0 for step 4"),
    ],
)
def test_a_schedule_that_fails_is_told_with_its_place(own: str, name: str, message: str) -> None:
    with pytest.raises(PipeplanError, match=message):
        custom_schedule(f"{own}:{name}")(4)


def test_a_schedule_that_does_not_exist_is_told(own: str) -> None:
    with pytest.raises(PipeplanError, match=r"schedule.kind '.*' has no callable 'none'; it has"):
        custom_schedule(f"{own}:none")
    with pytest.raises(PipeplanError, match="expected module:function, for example"):
        custom_schedule("exponential")
