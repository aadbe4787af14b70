"""A sweep by Ray on a cluster of this machine; skipped where Ray is not installed."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_sweeps import JOB, QUICK, chain, ring

from planner import sweep
from planner.errors import PipeplanError

ray = pytest.importorskip("ray")


@pytest.fixture
def two_cores() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes of a core each, both on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


POINTS = {"microbatches": [2, 4], "devices": [1, 2, 3], **QUICK}


def test_ray_finds_what_one_process_finds(tmp_path: Path, two_nodes: str) -> None:
    found = sweep(chain(), ring(3), JOB, tmp_path / "ray", ray=two_nodes, **POINTS)
    assert not ray.is_initialized()
    alone = sweep(chain(), ring(3), JOB, tmp_path / "alone", **POINTS)
    assert found.rows == alone.rows
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "ray" / path.name).read_bytes()


@pytest.mark.usefixtures("two_cores")
def test_ray_that_the_program_started_stays(tmp_path: Path) -> None:
    sweep(chain(), ring(2), JOB, tmp_path / "s", ray="auto", **QUICK)
    assert ray.is_initialized()


def test_no_cluster_at_the_address_is_told(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        taken = f"127.0.0.1:{free.getsockname()[1]}"
    ray.shutdown()
    for address in (taken, f"ray://{taken}", "auto"):
        with pytest.raises(PipeplanError, match=f"ray: no cluster at '{address}'.*ray start"):
            sweep(chain(), ring(2), JOB, tmp_path / "s", ray=address, **QUICK)
