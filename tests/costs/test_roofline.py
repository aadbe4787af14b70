"""A layer's time is the larger of arithmetic and traffic, unless it was measured."""

import pytest
from builders import device_type, graph, layer, star
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster.hardware import DeviceType, TileShape
from planner.costs.roofline import OperationTimes, layer_times
from planner.errors import PipeplanError
from planner.model.figures import Product
from planner.records.document import digest

OLD_GRAPH = "sha256:cee066793f1aefa44b9fd7a237fade38bddc71bf00123d0c5ca806f02daca19b"
OLD_CLUSTER = "sha256:1f6759ac51276e7d8a508227d98e2e67449bd5fc002eaafc85ee6405615f4356"

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


def test_what_a_forward_reads_of_the_batch_is_copied_to_the_device() -> None:
    """2 GB at 0.5 GB/s, and again where a forward runs again; measured times have it."""
    assert times(batch_bytes=2 * 10**9) == times()
    linked = DEVICE.model_copy(update={"host_link_gb_per_s": 0.5})
    row = graph([layer("a", **ROW, batch_bytes=2 * 10**9)]).layers["a"]
    assert layer_times(row, "kind", linked, "float32") == pytest.approx((3 + 4, 1, 1, 2))
    assert layer_times(row, "kind", linked, "float32", True) == pytest.approx((7, 8, 1, 9))
    seconds = {"forward_s": 0.1, "input_gradient_s": 0.2, "weight_gradient_s": 0.3}
    measured = graph([layer("a", **ROW, batch_bytes=10**9, measured={"kind": seconds})]).layers["a"]
    assert layer_times(measured, "kind", linked, "float32")[0] == 0.1


def test_every_forward_waits_for_the_loader_and_no_recomputed_one() -> None:
    """2 GB at 0.5 GB/s, whether the layer was measured or not."""
    slow = DEVICE.model_copy(update={"loader_gb_per_s": 0.5})
    row = graph([layer("a", **ROW, batch_bytes=2 * 10**9)]).layers["a"]
    assert layer_times(row, "kind", slow, "float32") == pytest.approx((3 + 4, 1, 1, 2))
    assert layer_times(row, "kind", slow, "float32", True) == pytest.approx((7, 1 + 3, 1, 2 + 3))
    seconds = {"forward_s": 1, "input_gradient_s": 2, "weight_gradient_s": 3}
    known = layer("a", **ROW, batch_bytes=2 * 10**9, measured={"kind": seconds})
    found = layer_times(graph([known]).layers["a"], "kind", slow, "float32", True)
    assert found == pytest.approx((5, 3, 3, 6))


def test_products_take_as_long_as_whole_waves_of_whole_tiles() -> None:
    """Tiles of 256 x 128, two at a time: a result of 300 x 200 has 4, so that 2 waves compute."""
    tiled = DEVICE.model_copy(update={"tiles": TileShape(rows=256, columns=128, at_once=2)})
    shape = {"operator": "linear", "batch": 1, "rows": 300, "inner": 64, "columns": 200}
    rows = [
        {**work("product", 10**12), "phase": phase}
        for phase in ("forward", "input_gradient", "weight_gradient")
    ]
    flops = {f"{row['phase']}_flops": 10**12 for row in rows}
    traffic = {f"{row['phase']}_traffic_bytes": 0 for row in rows}
    told = layer("a", **flops, **traffic, work=rows, products=[shape])
    # Whole tiles of the results 300 x 200, 300 x 64 and 64 x 200: 4, 2 and 2.
    elements = [300 * 200, 300 * 64, 64 * 200]
    by_hand = [0.5 * n * 256 * 128 / m for n, m in zip((4, 2, 2), elements, strict=True)]
    found = layer_times(graph([told]).layers["a"], "kind", tiled, "float32")
    assert found[:3] == pytest.approx(by_hand)
    assert layer_times(graph([told]).layers["a"], "kind", DEVICE, "float32")[0] == 0.5


@pytest.mark.parametrize(
    ("split", "sizes"),
    [(None, (6, 8, 10, 12)), ("batch", (3, 8, 10, 12)), ("columns", (6, 8, 10, 6))],
)
def test_a_member_of_a_group_runs_a_share_of_a_product(
    split: str | None, sizes: tuple[int, ...]
) -> None:
    given = {"operator": "bmm", "batch": 6, "rows": 8, "inner": 10, "columns": 12, "split": split}
    share = Product.model_validate(given).of_share(2)
    assert (share.batch, share.rows, share.inner, share.columns) == sizes
    assert share.split is None


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


# --- work told by classes of operations -----------------------------------------------------------

GIGA, TERA = 10**9, 10**12


def work(
    kind: str, flops: int, bytes_: int = 0, operations: int = 1, phase: str = "forward"
) -> dict:
    return {
        "phase": phase,
        "operation_class": kind,
        "operations": operations,
        "flops": flops,
        "traffic_bytes": bytes_,
    }


def forward_s(rows: list[dict], precision: str = "float32", **fields: object) -> float:
    """On a device of 4 TFLOP/s in float32, 8 in bfloat16 and 4 GB/s, half of the FLOPs reached."""
    device = DeviceType.model_validate({**DEVICE.model_dump(), **fields})
    told = {
        "forward_flops": sum(row["flops"] for row in rows),
        "forward_traffic_bytes": sum(row["traffic_bytes"] for row in rows),
        "input_gradient_flops": 0,
        "weight_gradient_flops": 0,
    }
    row = graph([layer("a", **told, work=rows)]).layers["a"]
    return layer_times(row, "kind", device, precision).forward_s


def test_each_operation_takes_the_larger_of_its_own_arithmetic_and_traffic() -> None:
    rows = [work("product", 6 * TERA, 4 * GIGA), work("memory", 0, 8 * GIGA)]
    assert forward_s(rows) == pytest.approx(3 + 2)  # As one operation: max(3, 3).
    assert forward_s([work("product", 6 * TERA, 40 * GIGA, operations=2)]) == pytest.approx(10)


def test_each_class_has_its_own_efficiencies() -> None:
    classes = {
        "attention": {"efficiency": 0.25},
        "memory": {"bandwidth_efficiency": 0.5},
        "convolution": {"efficiency": 1.0, "bandwidth_efficiency": 0.1},
    }
    rows = [work("product", TERA), work("attention", TERA), work("memory", 0, GIGA)]
    assert forward_s(rows, by_class=classes) == pytest.approx(0.5 + 1 + 0.5)
    assert forward_s([work("convolution", TERA, GIGA)], by_class=classes) == pytest.approx(2.5)
    assert forward_s(rows, bandwidth_efficiency=0.25) == pytest.approx(0.5 + 0.5 + 1)


def test_a_causal_mask_halves_the_arithmetic_of_attention() -> None:
    assert forward_s([work("causal_attention", 2 * TERA)]) == pytest.approx(0.5)
    classes = {"attention": {"efficiency": 0.25}}
    assert forward_s([work("causal_attention", 2 * TERA)], by_class=classes) == pytest.approx(1)


def test_every_operation_has_the_overhead_and_every_product_the_ramp_up() -> None:
    rows = [work("product", 2 * TERA, operations=3), work("memory", 0, 4 * GIGA, operations=5)]
    assert forward_s(rows, operation_overhead_us=1e5) == pytest.approx(1 + 1 + 8 * 0.1)
    assert forward_s(rows, ramp_up_us=1e5) == pytest.approx(1 + 3 * 0.1 + 1)


def test_a_product_as_long_as_its_ramp_up_runs_at_half_speed() -> None:
    full_s = forward_s([work("product", 2 * GIGA)])
    assert forward_s([work("product", 2 * GIGA)], ramp_up_us=full_s * 1e6) == pytest.approx(
        2 * full_s
    )


def test_float32_convolutions_run_in_tf32_and_products_do_not() -> None:
    peak = {"float32": 4.0, "tf32": 16.0, "bfloat16": 8.0}
    for kind, flop_per_s in (("convolution", 8 * TERA), ("product", 2 * TERA)):
        assert forward_s([work(kind, TERA)], peak_tflop_per_s=peak) == TERA / flop_per_s
    assert forward_s([work("convolution", TERA)], "bfloat16", peak_tflop_per_s=peak) == 0.25


def test_phases_are_told_apart() -> None:
    rows = [
        work("product", 2 * TERA, phase="input_gradient"),
        work("memory", 0, 4 * GIGA, phase="weight_gradient"),
    ]
    told = {**dict.fromkeys(ROW, 0), "input_gradient_flops": 2 * TERA}
    row = layer("a", **told, work=rows)
    row["weight_gradient_traffic_bytes"] = 4 * GIGA
    found = layer_times(graph([row]).layers["a"], "kind", DEVICE, "float32")
    assert found == (0, 1, 1, 2)


@given(st.data())
def test_more_work_never_takes_less_time(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["product", "convolution", "causal_attention", "memory"]))
    figures = {
        "bandwidth_efficiency": data.draw(st.floats(0.1, 2)),
        "operation_overhead_us": data.draw(st.floats(0, 50)),
        "ramp_up_us": data.draw(st.floats(0, 50)),
    }
    sizes = st.integers(0, 10**13)
    flops, bytes_ = (0 if kind == "memory" else data.draw(sizes)), data.draw(sizes)
    count = data.draw(st.integers(1, 9))
    more_flops = flops if kind == "memory" else flops + data.draw(sizes)
    more = work(kind, more_flops, bytes_ + data.draw(sizes), count + data.draw(st.integers(0, 9)))
    before = forward_s([work(kind, flops, bytes_, count)], **figures)
    # In the last digit the sums may differ.
    assert forward_s([more], **figures) >= before * (1 - 1e-12)


def test_one_operation_told_takes_what_an_undivided_layer_takes() -> None:
    """Device types without later fields price graphs of earlier versions as they did."""
    old = times()
    rows = [
        work("product", ROW[f"{p}_flops"], ROW[f"{p}_traffic_bytes"], phase=p)
        for p in ("forward", "input_gradient", "weight_gradient")
    ]
    assert times(work=rows) == pytest.approx(old)


def test_work_that_does_not_add_up_is_refused() -> None:
    row = layer("a", 1, 0, work=[work("product", TERA - 1)])
    with pytest.raises(PipeplanError, match=r"forward_flops is 1000000000000, .* 999999999999"):
        graph([row])


def test_graphs_and_clusters_that_tell_nothing_new_keep_their_digests() -> None:
    """Recorded with the version before work was told."""
    assert graph([layer("a"), layer("b")]).digest == OLD_GRAPH
    assert digest(star(2)) == OLD_CLUSTER
    assert "work" not in graph([layer("a")]).record.model_dump_json()
