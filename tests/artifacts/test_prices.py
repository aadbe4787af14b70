"""Prices in cluster files: of device types, nodes and devices."""

from pathlib import Path

import pytest
from builders import ROOT, graph, layer

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.problem import Problem, cluster_digest
from planner.records.document import digest

FILE = """
format = "pipeplan-cluster/1"
currency = "EUR"

[[nodes]]
name = "n0"
devices = 4
type = "A10"
link = "PCIe4-x16"
price_per_hour = 3.0

[[devices]]
name = "desk"
type = "own"

[[devices]]
name = "lent"
type = "own"
price_per_hour = 0

[[devices]]
name = "free"
type = "L4"

[device_types.own]
memory_gib = 24
memory_bandwidth_gb_per_s = 1000
peak_tflop_per_s = { float32 = 80 }
price_per_hour = 0.5
"""


def load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text)
    return Cluster.load(path)


def test_a_device_costs_its_own_price_its_part_of_the_node_s_or_its_type_s(tmp_path: Path) -> None:
    assert load(tmp_path, FILE).prices_per_hour == {
        **{f"n0/gpu{i}": 0.75 for i in range(4)},
        "desk": 0.5,
        "lent": 0.0,
        "free": None,
    }


@pytest.mark.parametrize("name", ["saved.toml", "saved.json"])
def test_prices_survive_saving(tmp_path: Path, name: str) -> None:
    cluster = load(tmp_path, FILE)
    cluster.save(tmp_path / name)
    assert Cluster.load(tmp_path / name) == cluster
    assert Cluster.load(tmp_path / name).currency == "EUR"


def without_prices(text: str) -> str:
    return "\n".join(
        line for line in text.splitlines() if not line.startswith(("price_per_hour", "currency"))
    )


def test_prices_change_no_problem(tmp_path: Path) -> None:
    """A bound proved, and a sweep begun, before there were prices stay what they were."""
    priced, plain = load(tmp_path, FILE), load(tmp_path, without_prices(FILE))
    assert digest(priced) != digest(plain)
    assert cluster_digest(priced) == cluster_digest(plain)
    row = graph([layer("a")])
    assert Problem(row, priced, Job()).digest == Problem(row, plain, Job()).digest


def test_clusters_without_prices_say_nothing_of_them() -> None:
    irregular = Cluster.load(ROOT / "examples" / "clusters" / "irregular.toml")
    assert "price_per_hour" not in irregular.model_dump_json()
    assert "currency" not in irregular.model_dump_json()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("= 3.0", "= -3.0", r"nodes\[0\].price_per_hour: expected at least 0.0 \(found -3.0\)"),
        ("= 0.5", '= "0.5"', "device_types.own.price_per_hour: expected a number without quotes"),
        ("= 0.5", "= inf", "price_per_hour"),
        ('"EUR"', '""', "currency"),
        ('"EUR"', '"E R"', "currency"),
        ("price_per_hour = 0.5", "price_per_h = 0.5", "did you mean 'price_per_hour'"),
    ],
)
def test_wrong_prices_are_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in FILE
    with pytest.raises(PipeplanError, match=reason):
        load(tmp_path, FILE.replace(old, new))
