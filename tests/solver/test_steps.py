"""The table of steps: which run, and how the clock divides its time among them."""

import pytest
from builders import graph, layer, star

from planner import Job, Problem
from planner.search.budget import Clock, SearchWork, Settings, TimeShare, TimeSlice
from planner.search.solve import STEPS, SearchStep, has_no_plan, has_plan, run_until_stopped
from planner.search.state import Search, SearchTask


def search_of(limit_s: float = 10.0) -> Search:
    problem = Problem(graph([layer("a"), layer("b")]), star(2), Job())
    return Search(SearchTask(problem, Settings(0, 1, True), 0.0), Clock(limit_s, True))


@pytest.mark.parametrize(
    ("share", "spent_s", "end_s"),
    [
        (TimeShare(0.3, "whole"), 1, 3),
        (TimeShare(0.3, "whole"), 4, 3),
        (TimeShare(0.25), 2, 4),
        (TimeShare(1), 7, 10),
        (TimeShare(0.02, "beyond"), 5, 10.2),
        (TimeShare(0.02, "beyond"), 12, 12.2),
    ],
)
def test_a_share_ends_at_its_part_of_the_limit(
    share: TimeShare, spent_s: float, end_s: float
) -> None:
    clock = Clock(10, True)
    clock.spend(spent_s)
    assert share.slice_of(clock).end_s == pytest.approx(end_s)


def test_a_slice_has_no_more_time_than_its_clock() -> None:
    clock = Clock(10, True)
    time = TimeShare(0.5).slice_of(clock)
    clock.spend(4)
    assert (time.left_s, time.has_time()) == (1, True)
    clock.stop()
    assert (time.left_s, time.has_time()) == (0, False)


def test_units_of_work_are_charged_by_their_number() -> None:
    clock = Clock(10, True)
    clock.charge(SearchWork.PARTITION_BOUND, 3)
    assert clock.elapsed_s == pytest.approx(3 * SearchWork.PARTITION_BOUND.seconds)


def test_steps_run_in_order_where_they_apply_until_ctrl_c() -> None:
    ran: list[str] = []

    def step(name: str, *, ends: bool = False, **settings: object) -> SearchStep:
        def run(search: Search, time: TimeSlice) -> None:
            ran.append(name)
            if ends:
                raise KeyboardInterrupt

        return SearchStep(name, run, TimeShare(1), **settings)

    search = search_of()
    steps = [
        step("first"),
        step("only with a plan", applies_to=has_plan),
        step("only without", applies_to=has_no_plan),
        step("interrupted", ends=True),
        step("never"),
    ]
    run_until_stopped(search, steps)
    assert ran == ["first", "only without", "interrupted"]
    assert search.clock.is_stopped


def test_the_table_of_solve_runs_each_kind_of_step_for_every_problem() -> None:
    names = {step.name for step in STEPS}
    search = search_of()
    small = {step.name for step in STEPS if step.applies_to(search)}
    # Some need a plan, one a job whose replicas form equal pipelines, one several stages a device,
    # one hosts whose devices slow each other, one rules.
    needing_a_plan = {"all quick schedules", "fewer replicas", "schedules by CP-SAT"}
    assert names - small == needing_a_plan | {
        "columns of devices",
        "equal pipelines",
        "several stages a device",
        "fewer devices of hosts",
        "plan model",
    }
