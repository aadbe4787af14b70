"""A calibrated plan predicts what was measured; what was not measured is told."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from measured_runs import run_of
from strategies import Scheduled, scheduled

from planner.assembly import plan_by_hand
from planner.costs.roofline import computed_times
from planner.interop.calibration import calibrate
from planner.model.figures import MeasuredTimes
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate_plan
from planner.verification import verify

pytestmark = pytest.mark.extensive

factors = st.tuples(*(st.floats(0.5, 3) for _ in "FIWB"))


def with_true_times(plan: Plan, scale: dict[str, tuple[float, ...]]) -> Plan:
    """The plan as it would be if every device type were off by factors for F, I, W and B."""
    problem = plan.problem

    def measured(name: str) -> dict[str, MeasuredTimes]:
        rows = {}
        for kind, by in scale.items():
            device = plan.cluster.device_types[kind]
            own = computed_times(problem.graph.layers[name], kind, device, plan.job.precision)
            values = [seconds * factor for seconds, factor in zip(own, by, strict=True)]
            rows[kind] = MeasuredTimes(**dict(zip(own._fields, values, strict=True)))
        return rows

    record = plan.model.graph
    layers = tuple(row.model_copy(update={"measured": measured(row.name)}) for row in record.layers)
    model = plan.model.model_copy(update={"graph": record.model_copy(update={"layers": layers})})
    return plan.model_copy(update={"model": model})


# Links that carry any number of messages: with queues, rounding may let another go first.
@given(scheduled(shared=True), st.data())
def test_a_calibrated_plan_takes_the_time_that_was_measured(
    case: Scheduled, data: st.DataObject
) -> None:
    plan = plan_by_hand(case.pipeline, case.orders)
    scale = {kind: data.draw(factors) for kind in plan.cluster.device_types}
    true = simulate_plan(with_true_times(plan, scale))
    result = calibrate(plan, run_of(plan, [true]))
    assert result.measured_s == pytest.approx(true.iteration_time_s, abs=1e-9)
    assert result.after_s == pytest.approx(true.iteration_time_s, rel=1e-6, abs=1e-7)
    found = simulate_plan(result.plan)
    lengths = {event.operation: event.end_s - event.start_s for event in true.operations}
    for event in found.operations:
        expected = lengths[event.operation]
        assert event.end_s - event.start_s == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert verify(result.plan) == []
    assert result.plan.execution_digest == plan.execution_digest


def with_links(plan: Plan, factor: float) -> Plan:
    """The plan on links without latency that are slower by a factor."""
    links = tuple(
        row.model_copy(
            update={"bandwidth_gb_per_s": row.bandwidth_gb_per_s / factor, "latency_us": 0.0}
        )
        for row in plan.cluster.links
    )
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"links": links})})


@given(scheduled(slowed=True), st.sampled_from([0.5, 1.0, 3.0]))
def test_bandwidths_that_are_all_off_by_a_factor_are_found(case: Scheduled, factor: float) -> None:
    plan = with_links(plan_by_hand(case.pipeline, case.orders), 1)
    true = simulate_plan(with_links(plan, factor))
    # Calibration does not know what messages lose to all-reduces on the same links.
    assume(
        not any(
            message.start_s < reduction.end_s and reduction.start_s < message.end_s
            for message in true.transfers
            for reduction in true.synchronisations
        )
    )
    result = calibrate(plan, run_of(plan, [true], emulated=True), links_only=True)
    assert result.times == ()
    if factor == 1.0:
        assert result.links == ()
        assert result.plan.cluster == plan.cluster
    # Links that no transfer used keep their bandwidth, and may now be the wider ones.
    assume(not any("takes another route" in note for note in result.notes))
    # What computing costs messages may count as their bandwidth then, which is told.
    assume(not any("cannot separate latency from bandwidth" in note for note in result.notes))
    found = {(e.source, e.target, e.operation): e for e in simulate_plan(result.plan).transfers}
    for event in true.transfers:
        other = found[event.source, event.target, event.operation]
        length_s = other.end_s - other.start_s
        assert length_s == pytest.approx(event.end_s - event.start_s, rel=2e-3, abs=1e-6)
