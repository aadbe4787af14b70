"""A layer's time is the larger of arithmetic and traffic, unless it was measured."""

import pytest
from builders import device_type, graph, layer

from planner.artifacts.hardware import DeviceType
from planner.costs.roofline import OperationTimes, layer_times

ROW = {
    "forward_flops": 6 * 10**12,
    "input_gradient_flops": 10**12,
    "weight_gradient_flops": 2 * 10**12,
    "forward_traffic_bytes": 10**9,
    "input_gradient_traffic_bytes": 4 * 10**9,
    "weight_gradient_traffic_bytes": 4 * 10**9,
}
# 4 TFLOP/s of which half is reached in float32, 8 in bfloat16; 4 GB/s.
DEVICE = DeviceType.model_validate(
    device_type(
        peak_tflop_per_s={"float32": 4.0, "bfloat16": 8.0},
        efficiency=0.5,
        memory_bandwidth_gb_per_s=4,
    )
)


def times(precision: str = "float32", recompute: bool = False, **fields: object) -> OperationTimes:
    row = graph([layer("a", **{**ROW, **fields})]).layers["a"]
    return layer_times(row, "kind", DEVICE, precision, recompute)


def test_the_larger_of_arithmetic_and_traffic_counts() -> None:
    assert times() == pytest.approx((3, 1, 1, 2))
    assert times("bfloat16") == pytest.approx((1.5, 1, 1, 2))
    assert times(forward_traffic_bytes=20 * 10**9) == pytest.approx((5, 1, 1, 2))


def test_a_whole_backward_is_both_gradients() -> None:
    found = times(weight_gradient_flops=5 * 10**12)
    assert [found.seconds(kind) for kind in "FBIW"] == pytest.approx([3, 3.5, 1, 2.5])


def test_recomputing_runs_the_forward_again_before_the_input_gradient() -> None:
    assert times(recompute=True) == pytest.approx((3, 4, 1, 5))


def test_measured_times_replace_the_roofline_on_their_device_type() -> None:
    seconds = {"forward_s": 0.1, "input_gradient_s": 0.2, "weight_gradient_s": 0.3}
    assert times(measured={"kind": seconds}) == (0.1, 0.2, 0.3, 0.5)
    assert times(measured={"kind": seconds}, recompute=True) == pytest.approx((0.1, 0.3, 0.3, 0.6))
    assert times(measured={"another": seconds}) == pytest.approx((3, 1, 1, 2))


def test_a_whole_backward_may_be_measured_as_well() -> None:
    seconds = {"forward_s": 0.1, "input_gradient_s": 0.2, "weight_gradient_s": 0.3}
    found = times(measured={"kind": {**seconds, "backward_s": 0.4}})
    assert [found.seconds(kind) for kind in "FBIW"] == [0.1, 0.4, 0.2, 0.3]
    assert found.is_quicker_whole
    assert not times(measured={"kind": seconds}).is_quicker_whole


def test_an_unknown_kind_of_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="'X'"):
        times().seconds("X")


def test_times_add_up_operation_by_operation() -> None:
    assert OperationTimes(1, 2, 3, 4) + OperationTimes(10, 20, 30, 40) == OperationTimes(
        11, 22, 33, 44
    )
