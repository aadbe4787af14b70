"""Runs at the speed of other machines: operations take their time, and buckets come within them."""

import json
from pathlib import Path

import executor_plans
import pytest
from builders import cluster, device_type, link
from executor_plans import DEVICES, pipeline_of, scheduled, traced
from launch import environment, forked
from pace_worker import STEPS, STRATEGIES

from executor.emulation.pace import DeviceTime
from models import ZOO
from planner.costs.layer_moments import LayerMoments
from planner.costs.placement import place_plan
from planner.plan.plan import Plan

pytestmark = pytest.mark.extensive

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two replicas of one stage, on devices so slow that a backward takes some 150 ms."""
    slow = cluster(
        DEVICES[:2],
        [link(device, "hub") for device in DEVICES[:2]],
        ["hub"],
        {"unit": device_type(peak_tflop_per_s={"float32": 1e-3})},
    )
    graph = traced("gpt_tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_plans, "FOUR_DEVICES", slow)
        stages = [(list(graph.layers), DEVICES[:2])]
        return scheduled(pipeline_of(graph, ZOO["gpt_tiny"], stages, microbatches=2))


@pytest.fixture(scope="module")
def found(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("pace")
    plan.save(folder / "plan.json")
    words = (str(HERE / "pace_worker.py"), str(folder / "plan.json"), str(folder / "found.json"))
    done = forked(2, *words, env=environment(HERE))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def compute_s(plan: Plan) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    (times,) = {*place_plan(plan).stages[0].times.values()}
    return times.forward_s, times.backward_s


@pytest.mark.parametrize("kind", ["emulated", "paced"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operations_take_their_time_and_buckets_begin_within_the_last(
    plan: Plan, found: dict[str, dict], kind: str, strategy: str
) -> None:
    run, (forward_s, backward_s) = found[f"{kind} {strategy}"], compute_s(plan)
    assert min(run["times_s"]) > 0.99 * (forward_s + backward_s)
    assert backward_s > 0.1
    shares = run["shares_left"]
    if strategy == "all_reduce:overlap=false":
        assert len(shares) == STEPS
        assert max(shares) <= 0
    elif strategy != "cross_iteration":
        # The head and the last block come first; blocks take most of the time. A machine with
        # other work may keep one step's reduction waiting, but lets none begin early.
        assert len(shares) == STEPS
        assert 0.4 < max(shares) < 1


@pytest.mark.parametrize("kind", ["emulated", "paced"])
def test_a_slow_rank_takes_its_factor_longer(plan: Plan, found: dict[str, dict], kind: str) -> None:
    assert min(found[f"slow {kind}"]["times_s"]) > 1.99 * sum(compute_s(plan))


def test_layers_use_parameters_in_order_and_complete_them_in_reverse(plan: Plan) -> None:
    pipeline = place_plan(plan)
    names = ("wte.weight", "h.0.ln_1.weight", "h.1.ln_1.weight")
    moments = LayerMoments.of(pipeline, 0, "d0", names)
    times = pipeline.stages[0].times["d0"]
    assert list(moments.needed) == list(names)
    assert moments.needed["wte.weight"] == 0
    assert 0 < moments.needed["h.0.ln_1.weight"] < moments.needed["h.1.ln_1.weight"]
    for kind in "BW":
        complete = moments.complete[kind]
        assert list(complete) == list(reversed(names))
        assert complete["wte.weight"] == pytest.approx(times.seconds(kind))
        assert list(complete.values()) == sorted(complete.values())


def test_a_device_that_computed_for_too_long_makes_up_for_little() -> None:
    clock = DeviceTime(factor=2.0, most_late_s=0.002)
    clock.begin()
    clock.begin_operation()
    clock.reach(0.01)
    first = clock._free_at_s
    assert first - clock._start_s == pytest.approx(0.02)
    clock.begin_operation()
    clock.reach(-1.0)
    assert clock._free_at_s >= first
