"""``pipeplan import``: what it writes, prints and refuses, and the way on from there."""

import json
from pathlib import Path

import pytest
from commands import pipeplan
from link_files import topology

from planner import Cluster
from planner.interop import imported as formats


def test_help_names_every_format() -> None:
    shown = pipeplan("import", "--help").stdout
    for name in (formats.AUTO, *formats.FORMATS):
        assert name in shown


WRONG = {
    "no such file": (("nowhere.txt",), "nowhere.txt: no such file"),
    "a folder": ((".",), "no regular file"),
    "unknown format": (("topo.txt", "--from", "onnx"), "'onnx' is unknown; use one of auto, rocm"),
    "unknown device": (("topo.txt", "--device-type", "X"), "'X' is unknown; use one of V100-16GB"),
    "no cluster's name": (("topo.txt", "-o", "graph.yaml"), "ends in .toml or .json"),
    "no such folder": (("topo.txt", "-o", "no/such/c.toml"), "no folder"),
    "over the file itself": (("c.toml", "-o", "c.toml"), "this is an input file of the command"),
    "a folder to write": (("topo.txt", "-o", "folder.json"), "it is a folder"),
    "a table of others": (("topo.txt", "--from", "rocm-smi"), "has no table 'Link Type between"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named_and_nothing_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.txt").write_text(topology(["X PIX", "PIX X"]))
    Path("folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    arguments, named = WRONG[case]
    result = pipeplan("import", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert named in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_topology_becomes_a_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.txt").write_text(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV4\t0-7\t0\nGPU1\tNV4\t X \t0-7\t0\n"
    )
    refused = pipeplan("import", "topo.txt")
    assert refused.exit_code == 1
    assert "give --device-type NAME" in refused.stderr
    assert not Path("cluster.toml").exists()
    done = pipeplan("import", "topo.txt", "--device-type", "A100-80GB")
    assert done.exit_code == 0, done.output
    assert "topo (nvidia-smi): 2 devices, 1 link" in done.stdout
    assert "next: pipeplan plan MODEL --cluster cluster.toml" in done.stdout
    (link,) = Cluster.load("cluster.toml").links
    assert (link.bandwidth_gb_per_s, link.source) == (100, "assumed")


def test_two_topologies_become_one_cluster_in_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["X NV12 PXB PXB", "NV12 X PXB PXB", "PXB PXB X PXB", "PXB PXB PXB X"]
    for name in "ab":
        Path(f"{name}.txt").write_text(topology(rows, cards=["NIC0", "NIC1"]))
    assert pipeplan("import", "a.txt", "--device-type", "A100-80GB", "-o", "a.toml").exit_code == 0
    renamed = pipeplan(
        *("import", "b.txt", "--device-type", "A100-80GB", "-o", "b.toml", "--prefix", "rack7/")
    )
    assert renamed.exit_code == 0
    merged = pipeplan("import", "a.toml", "b.toml", "--network", "100gbit")
    assert merged.exit_code == 0, merged.output
    cluster = Cluster.load("cluster.toml")
    assert cluster.device_names == ("a/gpu0", "a/gpu1", "rack7/gpu0", "rack7/gpu1")
    assert "next: pipeplan plan MODEL --cluster cluster.toml" in merged.stdout
    # Each GPU has the card that was divided to it, so that both reach the other box at once.
    pairs = (("a/gpu0", "rack7/gpu0"), ("a/gpu1", "rack7/gpu1"))
    assert [width for _, width in cluster.at_once(pairs) or ()] == [12.5]
    shown = [line.split() for line in merged.stdout.splitlines()]
    assert ["a/gpu1", "a/nic1"] in shown
    assert ["rack7/gpu0", "rack7/nic0"] in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a.toml",), "FILE: a.toml alone cannot be merged; give two files or more"),
        (("a.toml", "a.toml"), "the name 'a/gpu0' is also in a.toml; give --prefix once for each"),
        (("a.toml", "a.toml", "--prefix", "x"), "--prefix: 1 prefix for 2 files; give one"),
        (("a.toml", "b.toml", "-o", "c.txt"), "--output c.txt: expected a name that ends in .toml"),
        (("a.toml", "b.toml"), "b.toml: no such file"),
    ],
)
def test_boxes_that_cannot_be_merged_are_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(topology(["X PHB", "PHB X"], cards=["mlx5_0"]))
    assert pipeplan("import", "a.txt", "--device-type", "T4", "-o", "a.toml").exit_code == 0
    refused = pipeplan("import", *words, "--network", "25gbit")
    assert refused.exit_code == 1
    assert message in refused.stderr
    assert not Path("cluster.toml").exists()


def test_cards_that_stay_idle_and_detours_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["X SYS PIX NODE SYS", "SYS X SYS SYS PIX", "PIX SYS X NODE SYS"]
    rows += ["NODE SYS NODE X SYS", "SYS PIX SYS SYS X"]
    Path("a.txt").write_text(topology(rows, numa=["0", "1"], cards=["NIC0", "NIC1", "NIC2"]))
    assert pipeplan("import", "a.txt", "--device-type", "L40S", "-o", "a.toml").exit_code == 0
    files = ("a.toml", "a.toml", "--prefix", "x", "--prefix", "y")
    merged = pipeplan("import", *files, "--network", "InfiniBand-HDR")
    assert "note: no device is nearest to x/nic1, y/nic1; a message takes one" in merged.stdout
    detour = "note: x/gpu0 and x/gpu1 have 25 GB/s through the network and 15.75 inside their box"
    assert detour in merged.stdout


LOG = """# Collective test starting: sendrecv_perf
#  Rank  0 Group  0 Pid   1 on  n0 device  0 [0x07] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1 on  n1 device  0 [0x07] NVIDIA H100 80GB HBM3
#       size    count   type   redop  root    time   algbw   busbw #wrong   time   algbw   busbw #wrong
           8        2  float     sum    -1   20.00    0.00    0.00      0  20.00    0.00    0.00    N/A
          16        4  float     sum    -1   20.00    0.00    0.00      0  20.00    0.00    0.00    N/A
   500000000 12500000  float     sum    -1 10020.0   49.90   49.90      0 10020.0   49.90   49.90   N/A
  1000000000 25000000  float     sum    -1 20020.0   49.95   49.95      0 20020.0   49.95   49.95   N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 24.9625
"""  # noqa: E501


def test_a_log_of_nccl_tests_becomes_a_cluster_that_can_be_planned_for(tmp_path: Path) -> None:
    log, cluster = tmp_path / "run.log", tmp_path / "cluster.json"
    log.write_text(LOG)
    done = pipeplan("import", log, "-o", cluster, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["devices"] == ["n0/gpu0", "n1/gpu0"]
    assert report["links"][0]["bandwidth_gb_per_s"] == pytest.approx(50)
    assert report["links"][0]["latency_us"] == pytest.approx(20)
    route = Cluster.load(cluster).route("n0/gpu0", "n1/gpu0")
    assert route is not None
    assert route.seconds(10**9) == pytest.approx(20.02e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "nccl-all-reduce"), "is of sendrecv_perf, not of all_reduce_perf"),
        (("--from", "nvidia-smi"), "has no table of `nvidia-smi topo -m`"),
        (("--from", "nccl"), "use one of auto, rocm-smi"),
    ],
)
def test_options_that_do_not_fit_a_log_are_refused(
    options: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.log").write_text(LOG)
    result = pipeplan("import", "run.log", *options)
    assert result.exit_code == 1
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.log"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("tensor_parallel",), "--given tensor_parallel: expected NAME=VALUE, each name once"),
        (("=2",), "--given =2: expected NAME=VALUE"),
        (("gpu=a", "gpu=b"), "--given gpu=b: expected NAME=VALUE, each name once"),
        (("hosts=2",), "--given 'hosts': unknown to nvidia-smi; it takes pcie, peer_to_peer"),
    ],
)
def test_a_wrong_given_value_is_refused(
    tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    options = [word for text in given for word in ("--given", text)]
    path = tmp_path / "topo.txt"
    path.write_text(topology(["X PIX", "PIX X"]))
    result = pipeplan("import", path, "--device-type", "H200", *options)
    assert result.exit_code == 1
    assert message in result.stderr
