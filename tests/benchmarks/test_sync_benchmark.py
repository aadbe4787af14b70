"""``benchmarks.sync``: rates, losses and ratios by hand, and what its command line prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.catalogue import ROOM
from benchmarks.sync import __main__ as sync
from benchmarks.sync.claims import Claim, Outcome, best, run_lines, run_rows
from benchmarks.sync.figures import (
    Look,
    Measured,
    Spread,
    Step,
    compare,
    json_line,
    measured,
    ratio,
    steady_rate,
)
from benchmarks.sync.loopback import SETTINGS
from benchmarks.sync.model import held_out_loss, student
from benchmarks.sync.plans import pipelines_plan
from benchmarks.sync.predicted import Host, measured_rows
from benchmarks.sync.regret import regret_of, settings_of
from benchmarks.sync.settings import (
    ASYNC,
    DRAWN,
    EAGER,
    MATCHING,
    PAIRS,
    PARTIAL,
    STATIC,
    Grid,
    best_of,
)
from benchmarks.sync.shaped import LEGS, shaped_plan
from benchmarks.sync.short import claim_of
from benchmarks.sync.simulated import Simulated, flat_world, measured_of, pipeline_world
from benchmarks.sync.weights import Watched, mean_losses
from planner.sync.pipeline_replicas import pipeline_replicas_of
from planner.sync.simulation.comparison import ALL_STRATEGIES
from planner.sync.simulation.run import Scenario, simulate_sync, trace_sync
from planner.sync.strategies import parse_sync, sync_name

PLAIN = "all_reduce:overlap=false"


def run(rate: float, final: float = 1.0) -> Measured:
    """The loss falls from 2 to 1 in 100 shares."""
    looks = [Look(shares / rate, shares, 2 - shares / 100) for shares in range(0, 101, 10)]
    return Measured(rate, looks, final)


def test_a_rate_counts_only_while_all_are_warm_and_under_way() -> None:
    quick = [0.1 * step for step in range(1, 101)]
    slow = [0.4 * step for step in range(1, 16)]
    # The slow one's fifth step ends after 2 s, its last after 6 s.
    assert steady_rate([quick, slow], warm_up=4) == pytest.approx(10 + 2.5)
    late_start = [5.0, *(6.0 + 0.1 * step for step in range(50))]
    assert steady_rate([late_start], warm_up=1) == pytest.approx(10)


def test_a_window_that_cuts_a_long_step_changes_nothing() -> None:
    quick = [0.1 * step for step in range(1, 60)]
    slow = [1.0 * step for step in range(1, 6)]
    assert steady_rate([quick, slow], warm_up=1) == pytest.approx(11)


def test_pipelines_in_step_and_apart_count_the_same_shares() -> None:
    ends = [0.5 * step for step in range(1, 41)]
    steps = [Step(end, 0.5) for end in ends]
    together = measured([steps], 4, [Look(20.0, 40, 1.0)], 1.0)
    apart = measured([steps] * 4, 1, [Look(20.0, 160, 1.0)], 1.0)
    assert together.shares_per_s == apart.shares_per_s == pytest.approx(8)
    assert together.looks == apart.looks == [Look(20.0, 160, 1.0)]


def test_held_out_losses_are_of_the_mean_of_what_each_pipeline_has(tmp_path: Path) -> None:
    """Two pipelines of two places, the second of which steps half as often."""
    model = student(depth=1, width=8)
    names = [name for name, _ in model.named_parameters()]
    places = [names[:3], names[3:]]
    draw = torch.Generator().manual_seed(0)
    states: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for pipeline, ends_s in enumerate(([1.0, 2.0, 3.0, 4.0], [2.5, 4.5])):
        for place, mine in enumerate(places):
            held = {
                name: nn.Parameter(torch.zeros(model.get_parameter(name).shape)) for name in mine
            }
            watched = Watched(0.9)
            watched.optimizer(held.items(), 0.1)
            served = {"another": nn.Parameter(torch.ones(1))}
            watched.optimizer(served.items(), 0.1)
            for step, end_s in enumerate(ends_s, 1):
                for name, parameter in held.items():
                    parameter.data = torch.randn(parameter.shape, generator=draw)
                    states.setdefault((pipeline, step), {})[name] = parameter.detach().clone()
                watched.look(end_s)
            watched.save(tmp_path, "run", 2 * pipeline + place)
    looks = mean_losses(tmp_path, "run", student(depth=1, width=8), (4, 2), 2)
    # The ends in order: 1, 2, 2.5, 3, 4, 4.5 s.
    seen = {2.0: (2, 0), 3.0: (3, 1), 4.5: (4, 2)}
    assert [(at_s, steps) for at_s, steps, _ in looks] == [(2.0, 2), (3.0, 4), (4.5, 6)]
    for at_s, _, loss in looks:
        first, second = (states.get((p, step)) for p, step in enumerate(seen[at_s]))
        for name, parameter in model.named_parameters():
            other = torch.zeros_like(parameter) if second is None else second[name]
            parameter.data = (first[name] + other) / 2
        assert loss == pytest.approx(held_out_loss(model), rel=1e-6)
    assert list(tmp_path.iterdir()) == []


def test_the_time_to_a_loss_is_between_two_looks() -> None:
    assert run(10.0).time_to_s(1.55) == pytest.approx(4.5)
    assert run(10.0).shares_to(1.55) == pytest.approx(45)
    assert run(10.0).time_to_s(0.9) is None
    assert run(10.0).loss_after(0.5) == pytest.approx(1.5)


def test_ratios_are_taken_seed_by_seed() -> None:
    assert ratio([2.0, 6.0], [1.0, 2.0]) == Spread((2.0, 3.0))
    assert ratio([2.0, None], [1.0, 2.0]) is None
    assert str(Spread((2.0, 3.0))) == "2.50 (2.00..3.00)"


def test_a_comparison_has_the_targets_of_overlapped_all_reduce() -> None:
    runs = {"all_reduce": [run(10.0), run(20.0)], "ours": [run(30.0, 1.1), run(30.0, 0.9)]}
    found = compare(runs, "ours", "all_reduce")
    assert found.throughput.values == pytest.approx((3.0, 1.5))
    assert found.time_to_loss is not None
    assert found.time_to_loss.values == pytest.approx((3.0, 1.5))
    assert found.final_loss.mean == pytest.approx(1.0)


def test_a_line_has_the_fields_that_readers_expect() -> None:
    runs = {PLAIN: [run(10.0)], "all_reduce": [run(12.0)], "ours": [run(15.0)]}
    line = json.loads(json.dumps(json_line("ours", "quiet", compare(runs, "ours", PLAIN))))
    assert line["strategy"] == "ours"
    assert line["setting"] == "quiet"
    assert line["throughput_ratio"] == pytest.approx(1.5)
    assert line["time_to_loss_ratio"] == pytest.approx(1.5)
    assert line["seeds"] == 1
    assert line["spread"]["throughput_ratio"] == [1.5, 1.5]
    rows = run_lines("quiet", runs, is_real=True)
    assert [row["strategy"] for row in rows] == list(runs)
    assert rows[2]["overlapped_ratio"] == pytest.approx(1.25)
    assert len(run_rows("quiet", runs)) == 3


def test_the_best_of_the_strategies_that_were_run_is_found() -> None:
    runs = {"all_reduce": [run(10.0)], "a": [run(11.0)], "b": [run(12.0)]}
    name, found = best(runs, ("a", "b", "not_run"), "all_reduce")
    assert name == "b"
    assert found.throughput.mean == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("found", "at_most", "verdict"),
    [
        (Spread((1.8, 1.8)), False, "reached"),
        (Spread((1.9, 1.3)), False, "**not reached**"),
        (Spread((1.6,)), True, "reached"),
        (None, False, "**not reached**"),
    ],
)
def test_a_bar_that_is_not_reached_stays_in_sight(
    found: Spread | None, at_most: bool, verdict: str
) -> None:
    claim = Claim("faster", "two workers", True, 1.7, found, at_most=at_most)
    assert claim.row()[-1] == verdict
    assert claim.is_reached == (verdict == "reached")
    assert "two workers" in Outcome([claim]).markdown()


def test_what_is_faster_but_learns_less_has_reached_nothing() -> None:
    worse = Claim("faster", "two", True, 1.7, Spread((1.8,)), loss=Spread((1.02, 1.04)))
    assert worse.row()[-1] == ("**not reached**, at 1.03 (1.02..1.04) of the rival's held-out loss")
    told = claim_of(worse, "ours")
    assert told.reached is False
    assert told.figure is None
    assert "1.8, but at 1.03" in told.note
    equal = replace(worse, loss=Spread((1.0, 1.015)))
    assert equal.is_reached
    assert claim_of(equal, "ours").reached


def test_the_best_is_one_that_learns_as_well_if_there_is_any() -> None:
    runs = {"all_reduce": [run(10.0)], "worse": [run(13.0, 1.1)], "equal": [run(12.0, 1.005)]}
    assert best(runs, ("worse", "equal"), "all_reduce")[0] == "equal"
    assert best(runs, ("worse",), "all_reduce")[0] == "worse"


def test_pairs_do_not_count_as_partial_all_reduce() -> None:
    names = {sync_name(strategy): [run(12.0)] for strategy in ALL_STRATEGIES}
    runs = names | {PAIRS: [run(20.0)], MATCHING: [run(19.0)], DRAWN: [run(13.0)]}
    assert best(runs, PARTIAL, "all_reduce")[0] == DRAWN


def test_the_published_report_has_every_section_or_says_that_it_is_not_measured() -> None:
    text = (ROOM / "SYNC.md").read_text()
    for name, section in sync.sections_of(sync.options_of([])).items():
        (found,) = text.split(f"\n## {section.title}\n")[1:]
        found = found.partition("\n## ")[0]
        assert "\n|---|" in found or (
            "**Not measured yet**" in found and f"--rows {name}`" in found
        )


def test_every_strategy_has_its_own_best_rate() -> None:
    losses = {("a", 0.1): 1.0, ("a", 0.2): 0.9, ("b", 0.1): 1.0, ("b", 0.2): float("nan")}
    assert best_of(losses) == {"a": 0.2, "b": 0.1}


def test_without_momentum_rates_are_such_that_equal_gradients_lead_as_far() -> None:
    grid = Grid(shaped_plan(0.002), {}, (), 1, 1, rates=(0.1, 0.2), momenta=(0.0, 0.9))
    assert grid.descents == [
        pytest.approx((1.0, 0.0)),
        pytest.approx((2.0, 0.0)),
        pytest.approx((0.1, 0.9)),
        pytest.approx((0.2, 0.9)),
    ]


def test_the_report_has_the_rows_that_are_predicted() -> None:
    assert {setting for setting, _ in measured_rows()} == {
        *SETTINGS,
        "shaped_2MB_per_s",
        "shaped_6MB_per_s",
        *LEGS,
    }


def test_a_host_is_derived_from_a_trace_of_groups() -> None:
    """A trace that the simulator makes of a host leads back to it."""
    plan = shaped_plan(0.002)
    host = Host(0.105, 2e-3, 5e-3, 3e-3, 8e-3)
    _, trace = trace_sync(Scenario(host.world(plan), 60), parse_sync(STATIC))
    found = Host.of(trace, plan)
    assert found.iteration_s == pytest.approx(host.iteration_s, rel=0.02)
    assert found.message_s == pytest.approx(host.message_s, rel=0.3)
    assert found.jitter_s == pytest.approx(host.jitter_s, rel=0.3)
    assert found.lateness_s == pytest.approx(host.lateness_s, rel=0.3)
    assert found.round_trip_s == pytest.approx(host.round_trip_s, rel=0.3)


def test_a_choice_costs_what_the_fastest_one_saves() -> None:
    gains = {"all_reduce": 1.0, PAIRS: 1.5, DRAWN: 1.2, EAGER: 1.8, ASYNC: 0.0, STATIC: 1.0}
    real = {"all_reduce": 1.1, DRAWN: 1.0, PAIRS: 0.0, EAGER: 0.9}
    found = regret_of("here", DRAWN, gains, real)
    assert found.fastest == PAIRS
    assert found.simulated == pytest.approx(0.25)
    assert found.servers == pytest.approx(0.5)
    assert found.measured_fastest == "all_reduce"
    assert found.measured == pytest.approx(0.1)
    row = found.row({DRAWN: 0.1, PAIRS: 0.05})
    told = [f"`{DRAWN}` 0.1", f"`{PAIRS}` 0.05", "25.0%", "50.0%", "10.0% (`all_reduce`)"]
    assert row[1:] == told
    assert regret_of("here", PAIRS, gains, real).simulated == 0
    assert regret_of("here", STATIC, gains, real).measured is None
    never = regret_of("here", PAIRS, {**gains, PAIRS: 0.0}, {})
    assert never.simulated == float("inf")


def test_the_choice_is_tried_in_at_least_twenty_settings() -> None:
    names = [setting.name for setting in settings_of()]
    assert len(set(names)) == len(names) >= 20
    assert {*SETTINGS, *LEGS} < set(names)


def test_a_plan_takes_the_time_that_was_asked_for() -> None:
    flat = pipelines_plan(8, 0.1)
    assert flat.predicted.iteration_time_s == pytest.approx(0.1, rel=0.03)
    deep = pipelines_plan(4, 0.1, stages=4, microbatches=4)
    assert len(deep.ranks) == 16
    assert [len(lane.devices) for lane in pipeline_replicas_of(deep)] == [4] * 4


def test_worlds_take_a_tenth_of_a_second_and_what_was_asked_for_of_communication() -> None:
    flat = flat_world(8, 2.0)
    assert flat.iteration_s == pytest.approx(0.1)
    (ring,) = flat.all_reduce(tuple(range(8)), flat.parameter_bytes).flows
    moving_s = ring.fixed_s + ring.bytes / 1e9 / ring.most_gb_per_s
    assert moving_s == pytest.approx(0.2 * 7 / 8, rel=0.01)
    assert pipeline_world(4, 4, 8, 0.02).iteration_s == pytest.approx(0.1)


def test_a_simulated_run_has_the_figures_of_a_real_one() -> None:
    setting = Simulated("small", "small", flat_world(4, 0.1), iterations=20)
    scenario = setting.scenario(0)
    found = measured_of(simulate_sync(scenario, parse_sync("all_reduce")), scenario)
    assert found.shares_per_s == pytest.approx(40, rel=0.1)
    assert found.looks[-1].shares == 80
    assert found.time_to_s(found.loss_after(0.5)) is not None


def test_the_simulators_sections_print_lines_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    small = sync.Section("Small", "Nothing.", lambda: Outcome(lines=[{"strategy": "ours"}]))
    monkeypatch.setattr(sync, "sections_of", lambda options: {"small": small})
    report = tmp_path / "SYNC.md"
    assert sync.main(["--short", "--json", "--report", str(report)]) == 0
    assert json.loads(capsys.readouterr().out) == {"strategy": "ours"}
    assert "Made by `python -m benchmarks.sync --seeds 1 --short --json`" in report.read_text()
    assert sync.main(["--rows", "speed"]) == 1
    assert "speed is not known; choose from small" in capsys.readouterr().err
