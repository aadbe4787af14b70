"""Names and quantities are short and still unambiguous."""

import pytest

from planner.plan.operations import compress_devices, stages_label
from planner.report.figures import lighter
from planner.units import format_bytes, format_seconds, plural


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["n0/gpu0", "n0/gpu1", "n0/gpu2"], "n0/gpu0-2"),
        (["n0/gpu0", "n0/gpu2"], "n0/gpu0, n0/gpu2"),
        (["n0/gpu0", "n1/gpu1"], "n0/gpu0, n1/gpu1"),
        (["n0/gpu7", "n0/gpu8", "n1/gpu0", "n1/gpu1"], "n0/gpu7-8, n1/gpu0-1"),
        (["gpu7"], "gpu7"),
        (["gpu9", "gpu10", "gpu11"], "gpu9-11"),
        (["gpu2", "gpu1"], "gpu2, gpu1"),
        (["alpha", "beta"], "alpha, beta"),
        (["gpu08", "gpu09"], "gpu08, gpu09"),
        ([], ""),
    ],
)
def test_consecutive_numbers_are_drawn_together(names, short):
    assert compress_devices(names) == short


def test_times_are_in_the_unit_easiest_to_read():
    assert format_seconds(12.3456) == "12.35 s"
    assert format_seconds(1.5) == "1500 ms"
    assert format_seconds(0.2074618) == "207.5 ms"
    assert format_seconds(12e-6) == "12 µs"


def test_sizes_are_in_the_unit_easiest_to_read():
    assert format_bytes(1.25 * 2**30) == "1.25 GiB"
    assert format_bytes(300.04 * 2**20) == "300 MiB"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(7) == "7 B"


def test_stages_are_named_in_singular_and_plural():
    assert stages_label([3]) == "stage 3"
    assert stages_label([0, 1, 2, 8]) == "stages 0-2, 8"
    assert plural(2, "microbatch", "es") == "2 microbatches"


def test_lighter_mixes_with_white():
    assert lighter("#0080FF", 0.0) == "#0080FF"
    assert lighter("#0080FF", 0.5) == "#80C0FF"
    assert lighter("#0080FF", 1.0) == "#FFFFFF"


def test_large_figures_have_no_exponent():
    assert format_bytes(37250 * 2**30) == "36.38 TiB"
    assert format_bytes(3 * 2**50) == "3 PiB"
    assert format_seconds(123456) == "123,456 s"
    assert plural(12345, "layer") == "12,345 layers"
