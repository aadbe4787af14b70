"""Costs files: what they refuse, and costs between two measured sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PipeplanError
from planner.model.measured_costs import Costs


def timing(seconds: float) -> dict[str, Any]:
    return {"median_s": seconds, "low_s": seconds, "high_s": seconds, "repeats": 5}


def size(samples: int, seconds: float, flops: int = 100) -> dict[str, Any]:
    return {
        "samples_per_microbatch": samples,
        "forward_flops": flops * samples,
        "forward": timing(seconds),
        "backward": timing(2 * seconds),
        "input_gradient": timing(1.2 * seconds),
        "weight_gradient": timing(seconds),
        "stash_bytes": 10,
        "weight_stash_bytes": 12,
        "forward_bytes": 20,
        "backward_bytes": 30,
    }


def data(*kinds: tuple[list[str], list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "format": "pipeplan-costs/1",
        "model": "small",
        "precision": "float32",
        "device_type": "CPU-core",
        "hardware": "a processor",
        "threads": 1,
        "made_with": {"torch": "2.13.0"},
        "date": "2026-11-22",
        "kinds": [{"layers": layers, "sizes": sizes} for layers, sizes in kinds],
    }


def test_a_size_that_was_measured_has_its_medians() -> None:
    costs = Costs.parse(data((["a", "b"], [size(1, 1.0), size(2, 1.5)])))
    times = costs.at("b", 2)
    assert (times.forward_s, times.whole_backward_s) == (1.5, 3.0)
    assert (times.input_gradient_s, times.weight_gradient_s) == (pytest.approx(1.8), 1.5)


def test_repetitions_that_differ_much_are_told() -> None:
    """Two layers of 1 s forward and 2 s backward; the quartiles of forwards are 0.9 s apart."""
    row = size(1, 1.0)
    assert Costs.parse(data((["a", "b"], [row]))).spread_warning is None
    row["forward"].update(low_s=0.5, high_s=1.4)
    costs = Costs.parse(data((["a", "b"], [row])))
    assert costs.spread == pytest.approx(0.9 / 3)
    assert costs.spread_warning is not None
    assert costs.spread_warning.startswith("repetitions of a measurement differ by 30% of their")


@given(st.integers(2, 8))
def test_between_two_sizes_costs_lie_on_a_straight_line(samples: int) -> None:
    costs = Costs.parse(data((["a"], [size(1, 1.0), size(2, 3.0), size(8, 15.0)])))
    assert costs.at("a", samples).forward_s == pytest.approx(3.0 + 2.0 * (samples - 2))


@pytest.mark.parametrize("samples", [1, 9])
def test_a_size_outside_those_measured_is_refused_with_the_remedy(samples: int) -> None:
    costs = Costs.parse(data((["a"], [size(2, 1.0), size(8, 4.0)])))
    with pytest.raises(PipeplanError, match=rf"measured: 2, 8\).*--samples {samples}"):
        costs.at("a", samples)


def test_a_layer_that_was_not_measured_is_refused() -> None:
    with pytest.raises(PipeplanError, match="layer 'c' is in none of them"):
        Costs.parse(data((["a"], [size(1, 1.0)]))).at("c", 1)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    costs = Costs.parse(data((["a"], [size(1, 1.0)]), (["b"], [])))
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


def wrong(change: str) -> dict[str, Any]:
    found = data((["a"], [size(1, 1.0), size(2, 2.0)]))
    rows = found["kinds"][0]["sizes"]
    match change:
        case "order":
            rows.reverse()
        case "quartiles":
            rows[0]["forward"]["low_s"] = 2.0
        case "twice":
            found["kinds"].append({"layers": ["a"], "sizes": []})
        case "unknown":
            found["speed"] = 1
        case "negative":
            rows[0]["stash_bytes"] = -1
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("order", "that of 1 sample comes after that of 2 samples"),
        ("quartiles", r"kinds\[0\].sizes\[0\].forward: median_s: 1 is not between"),
        ("twice", "layer 'a' appears 2 times"),
        ("unknown", "speed: unknown field"),
        ("negative", r"kinds\[0\].sizes\[0\].stash_bytes: expected at least 0"),
    ],
)
def test_what_is_wrong_is_named(change: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(wrong(change)))
    with pytest.raises(PipeplanError, match=told):
        Costs.load(path)
