"""Figures in wrong units are refused where people write them, with their likely unit."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError

RIGHT = {
    "memory_gib": "80",
    "memory_bandwidth_gb_per_s": "2039",
    "host_link_gb_per_s": "64",
    "loader_gb_per_s": "2",
    "operation_overhead_us": "5",
    "ramp_up_us": "2",
    "peak": "312",
    "bandwidth_gb_per_s": "25",
    "latency_us": "5",
}


def cluster_file(path: Path, top: str = "", **figures: str) -> Path:
    found = {**RIGHT, **figures}
    path.write_text(
        f"""format = "pipeplan-cluster/1"
{top}
[device_types.Own]
memory_gib = {found["memory_gib"]}
memory_bandwidth_gb_per_s = {found["memory_bandwidth_gb_per_s"]}
host_link_gb_per_s = {found["host_link_gb_per_s"]}
loader_gb_per_s = {found["loader_gb_per_s"]}
operation_overhead_us = {found["operation_overhead_us"]}
ramp_up_us = {found["ramp_up_us"]}
peak_tflop_per_s = {{ bfloat16 = {found["peak"]} }}
[link_types.fabric]
bandwidth_gb_per_s = {found["bandwidth_gb_per_s"]}
[[devices]]
name = "a"
type = "Own"
[[devices]]
name = "b"
type = "Own"
[[links]]
between = ["a", "b"]
preset = "fabric"
latency_us = {found["latency_us"]}
"""
    )
    return path


WRONG = [
    ("memory_gib", "81920", "MiB would be 80:"),
    ("memory_gib", "85899345920.0", "bytes would be 80:"),
    ("memory_bandwidth_gb_per_s", "2039000", "MB/s would be 2039:"),
    ("peak", "312000", "GFLOP/s would be 312:"),
    ("peak", "312e12", "FLOP/s would be 312:"),
    ("bandwidth_gb_per_s", "25000", "MB/s would be 25:"),
    ("bandwidth_gb_per_s", "25e9", "bytes/s would be 25:"),
    ("latency_us", "5e-6", "s would be 5:"),
    ("latency_us", "5e8", "ns would be 500000:"),
    ("latency_us", "5e6", "ns would be 5000:"),
    ("host_link_gb_per_s", "64e9", "bytes/s would be 64:"),
    ("loader_gb_per_s", "2e9", "bytes/s would be 2:"),
    ("operation_overhead_us", "5e-6", "s would be 5:"),
    ("ramp_up_us", "2e6", "ns would be 2000:"),
]


@pytest.mark.parametrize(("field", "value", "unit"), WRONG)
def test_a_figure_in_another_unit_is_named_with_it(
    tmp_path: Path, field: str, value: str, unit: str
) -> None:
    path = cluster_file(tmp_path / "cluster.toml", **{field: value})
    with pytest.raises(PipeplanError) as raised:
        Cluster.load(path)
    (problem,) = raised.value.problems
    place = {
        "peak": 'device_types."Own".peak_tflop_per_s.bfloat16',
        "bandwidth_gb_per_s": 'link_types."fabric".bandwidth_gb_per_s',
        "latency_us": "links[0].latency_us",
    }.get(field, f'device_types."Own".{field}')
    assert problem.startswith(f"{path}: {place}: {float(value):g} ")
    assert unit in problem
    assert problem.endswith("or set unusual_figures = true at the top")


@pytest.mark.parametrize(("field", "value", "unit"), WRONG)
def test_figures_in_json_are_checked_alike(
    tmp_path: Path, field: str, value: str, unit: str
) -> None:
    unusual = cluster_file(tmp_path / "a.toml", "unusual_figures = true", **{field: value})
    Cluster.load(unusual).save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data.pop("unusual_figures") is True
    path = tmp_path / "b.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PipeplanError) as raised:
        Cluster.load(path)
    (problem,) = raised.value.problems
    assert problem.startswith(f"{path}: ")
    assert unit in problem
    assert problem.endswith('or set "unusual_figures": true at the top')


@pytest.mark.parametrize("value", [np.float32(80), b"80", {80}, Path("80")])
def test_a_value_that_no_file_can_hold_is_named_with_its_field(
    tmp_path: Path, value: object
) -> None:
    data = tomllib.loads(cluster_file(tmp_path / "a.toml").read_text())
    data["device_types"]["Own"]["memory_gib"] = value
    with pytest.raises(PipeplanError, match=r"^cluster: device_types\.Own\.memory_gib: expected "):
        Cluster.from_data(data)


@pytest.mark.parametrize(("field", "value", "unit"), WRONG)
def test_unusual_figures_hold_where_the_file_says_so(
    tmp_path: Path, field: str, value: str, unit: str
) -> None:
    path = cluster_file(tmp_path / "a.toml", "unusual_figures = true", **{field: value})
    found = Cluster.load(path)
    for name in ("b.toml", "b.json"):  # What was written by us is read again.
        found.save(tmp_path / name)
        assert Cluster.load(tmp_path / name) == found


def test_usual_figures_hold(tmp_path: Path) -> None:
    found = Cluster.load(cluster_file(tmp_path / "cluster.toml"))
    found.save(tmp_path / "again.toml")
    assert "unusual_figures" not in (tmp_path / "again.toml").read_text()
