"""What a calibration did to all-reduces, in a table and as data."""

from builders import graph, layer, orders, parameter, pipeline, star
from measured_runs import run_of
from rich.console import Console

from planner.assembly import plan_by_hand
from planner.interop.calibration import calibrate
from planner.report.deviation import calibration_data, calibration_view


def test_all_reduces_are_told_before_after_and_measured() -> None:
    the_graph = graph([layer("a", parameters=["w"])], parameters=[parameter("w", 250_000_000)])
    placed = pipeline(the_graph, star(2), [(("a",), ("d0", "d1"))])
    plan = plan_by_hand(placed, orders(d0="0F0 0B0", d1="0F1 0B1"))
    result = calibrate(plan, run_of(plan))
    # 10**9 bytes over 1 GB/s: two steps of half of them.
    assert calibration_data(result)["all_reduces"] == [
        {"stages": [0], "predicted_before_s": 1.0, "predicted_after_s": 1.0, "measured_s": 1.0}
    ]
    console = Console(width=120)
    with console.capture() as printed:
        console.print(*calibration_view(result), sep="\n")
    rows = [line.split() for line in printed.get().splitlines()]
    assert ["stage", "0", *["1,000.000"] * 3] in rows
