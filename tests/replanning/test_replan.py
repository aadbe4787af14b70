"""New plans after a change of machines: valid, bounded, near the old ones, of the same training."""

from pathlib import Path

import pytest
from trained import QUICK, STATE_BYTES, model, nodes, plan_of, two_nodes

from planner import Replanned, replan, simulate, verify
from planner.errors import InfeasibleError, PipeplanError
from planner.plan.moves import Moves
from planner.plan.plan import Plan, Sync
from planner.search.solve import solve

EVENTS = {
    "a device lost": {"lost": ["n0/gpu1"]},
    "a node lost": {"lost": ["n1"]},
    "a device slow": {"slow": {"n1/gpu0": 1.5}},
    "a node slow": {"slow": {"n1": 3}},
    "a device added": {"added": ["n0/gpu2=n0/gpu0"]},
    "a node added": {"added": ["n2=n1"]},
    "a device exchanged": {"lost": ["n0/gpu0"], "added": ["n0/gpu0=n1/gpu1"]},
    "other machines": {"cluster": nodes(1, 3)},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Replanned]:
    plan = two_nodes()
    return {name: replan(plan, **event, **QUICK) for name, event in EVENTS.items()}


@pytest.mark.parametrize("name", EVENTS)
def test_a_new_plan_holds_and_its_bound_is_of_the_new_machines(
    found: dict[str, Replanned], name: str
) -> None:
    plan = found[name].plan
    assert verify(plan) == []
    assert plan.provenance.problem_digest == plan.problem.digest
    assert 0 < plan.predicted.lower_bound_s <= simulate(plan).iteration_time_s * (1 + 1e-9)


@pytest.mark.parametrize("name", EVENTS)
def test_the_training_stays_the_same(found: dict[str, Replanned], name: str) -> None:
    old, new = two_nodes(), found[name].plan
    assert (new.job, new.microbatches, new.sync) == (old.job, old.microbatches, old.sync)
    assert [row.name for row in new.model.graph.layers] == [
        row.name for row in old.model.graph.layers
    ]


@pytest.mark.parametrize("name", EVENTS)
def test_the_choice_moves_no_more_than_the_fastest_and_keeps_the_slack(
    found: dict[str, Replanned], name: str
) -> None:
    chosen, fastest, least = found[name].alternatives
    assert chosen.iteration_time_s <= 1.05 * fastest.iteration_time_s * (1 + 1e-9)
    assert least.moved_bytes <= chosen.moved_bytes <= fastest.moved_bytes
    assert fastest.iteration_time_s <= chosen.iteration_time_s * (1 + 1e-9)
    assert chosen.moved_bytes == found[name].moves.bytes
    assert chosen.iteration_time_s == found[name].iteration_time_s


def test_a_replica_less_moves_nothing() -> None:
    """Both plans of three devices take the time of the stage with one; the old stages stay."""
    found = replan(two_nodes(), lost=["n0/gpu1"], slack=10, **QUICK)
    assert found.moves.moves == ()
    assert [stage.devices for stage in found.plan.stages] == [("n0/gpu0",), ("n1/gpu0", "n1/gpu1")]
    assert found.old_iteration_time_s == two_nodes().predicted.iteration_time_s


def test_a_lost_stage_comes_from_the_checkpoint() -> None:
    found = replan(two_nodes(), lost=["n1"], **QUICK)
    assert found.moves.bytes_from_checkpoint >= 3 * STATE_BYTES
    lost = {name for row in found.moves.moves if row.source is None for name in row.parameters}
    assert lost == {"w3", "w4", "w5"}


def test_without_slack_the_fastest_found_is_taken() -> None:
    found = replan(two_nodes(), added=["n2=n1"], slack=0, **QUICK)
    chosen, fastest, _ = found.alternatives
    assert chosen.iteration_time_s == pytest.approx(fastest.iteration_time_s, rel=1e-9)


def test_what_is_lost_and_comes_back_is_as_fast_as_a_plan_made_anew() -> None:
    plan = solve(two_nodes().problem, deterministic=True, time_limit_s=0.5).plan
    less = replan(plan, lost=["n1/gpu1"], **QUICK).plan
    back = replan(less, added=["n1/gpu1=n1/gpu0"], slack=0, **QUICK)
    assert back.iteration_time_s <= plan.predicted.iteration_time_s * 1.001


def test_a_plan_is_the_same_every_time() -> None:
    first, second = (replan(two_nodes(), lost=["n1/gpu0"], **QUICK) for _ in range(2))
    assert first.plan == second.plan
    assert first.moves == second.moves


def test_what_does_not_fit_any_more_is_told_with_remedies() -> None:
    weights = 6 * STATE_BYTES + 6 * 4000
    plan = plan_of(
        model(), nodes(1, 1, memory_gib=0.7 * weights / 2**30), [(3, "n0/gpu0"), (3, "n1/gpu0")]
    )
    with pytest.raises(InfeasibleError) as error:
        replan(plan, lost=["n1"], **QUICK)
    assert "no plan fits" in str(error.value)
    assert "1 more device of type 'unit'" in str(error.value)


def test_layers_bound_to_a_type_stay_on_it_when_it_is_slow() -> None:
    plan = plan_of(model(device_types=["unit"]), nodes(2), [(3, "n0/gpu0"), (3, "n0/gpu1")])
    assert verify(replan(plan, slow={"n0/gpu1": 2}, **QUICK).plan) == []


def test_several_stages_a_device_can_be_replanned() -> None:
    rows = [(2, "n0/gpu0"), (1, "n0/gpu1"), (1, "n0/gpu0"), (2, "n0/gpu1")]
    plan = plan_of(model(), nodes(3), rows, max_stages_per_device=2)
    found = replan(plan, lost=["n0/gpu1"], **QUICK)
    assert verify(found.plan) == []
    assert "n0/gpu1" not in found.plan.ranks


def test_one_device_a_stage_where_the_job_forbids_replicas() -> None:
    rows = [(2, "n0/gpu0"), (2, "n0/gpu1"), (2, "n0/gpu2")]
    plan = plan_of(model(), nodes(4), rows, replication=False)
    found = replan(plan, lost=["n0/gpu1"], **QUICK)
    assert all(len(stage.devices) == 1 for stage in found.plan.stages)
    assert found.plan.ranks == ("n0/gpu0", "n0/gpu2", "n0/gpu3")
    assert found.moves.bytes == 2 * STATE_BYTES


def test_idle_devices_take_over_where_all_in_use_are_lost() -> None:
    plan = plan_of(model(), nodes(1, 2), [(6, "n0/gpu0")])
    found = replan(plan, lost=["n0"], **QUICK)
    assert verify(found.plan) == []
    assert found.moves.bytes_between_devices == 0
    assert found.moves.bytes_from_checkpoint >= 6 * STATE_BYTES


def test_strategies_between_pipelines_are_refused() -> None:
    plan = two_nodes().model_copy(update={"sync": Sync(strategy="ad_psgd")})
    with pytest.raises(PipeplanError, match="--warm-start"):
        replan(plan, lost=["n0"], **QUICK)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slack": -0.1}, "slack: "),
        ({"slack": float("nan")}, "slack: "),
        ({"time_limit_s": 0}, "time_limit_s"),
    ],
)
def test_wrong_settings_are_named(options: dict, text: str) -> None:
    with pytest.raises(PipeplanError, match=text):
        replan(two_nodes(), lost=["n0"], **options)


def test_stages_of_an_edited_plan_must_hold_the_layers() -> None:
    plan = two_nodes()
    cut = plan.model_copy(update={"stages": plan.stages[:1]})
    with pytest.raises(PipeplanError, match="every layer must be in exactly one"):
        replan(cut, lost=["n0/gpu1"], **QUICK)


def test_moves_are_written_and_read(tmp_path: Path) -> None:
    moves = replan(two_nodes(), lost=["n1"], **QUICK).moves
    moves.save(tmp_path / "moves.json")
    assert Moves.load(tmp_path / "moves.json") == moves
    with pytest.raises(PipeplanError, match="what a new plan moves"):
        Plan.load(tmp_path / "moves.json")
