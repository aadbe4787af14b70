"""The roofline's benchmark: what is measured, fitted and kept."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from builders import ROOT, graph, layer
from warm_python import warm_python

from benchmarks.roofline.cases import load, save
from benchmarks.roofline.fit import START, Timed, device_with, errors, fit, left_out
from benchmarks.roofline.measure import Case, Sample, measure
from benchmarks.roofline.public import PUBLISHED, predicted_s
from benchmarks.roofline.run import timed_rows
from planner.cluster.hardware import DeviceType
from planner.cluster.presets import DEVICES
from planner.costs.roofline import layer_times
from planner.errors import PipeplanError

pytestmark = pytest.mark.extensive

DEVICE = DeviceType(
    memory_gib=16,
    memory_bandwidth_gb_per_s=100,
    peak_tflop_per_s={"float32": 1.0},
    operation_overhead_us=3,
    ramp_up_us=1,
)
TRUTH = {
    "product": 0.8,
    "convolution": 0.35,
    "attention": 0.3,
    "memory_bandwidth": 0.6,
    "convolution_bandwidth": 0.25,
    "bandwidth": 0.7,
    "convolution_ramp_up_us": 40.0,
}
TINY = Case("gpt_tiny", 2, {"layers": 3, "width": 32, "sequence_length": 16})


def layer_of(name: str, *rows: tuple[str, int, int]) -> dict:
    work = [
        {
            "phase": "forward",
            "operation_class": kind,
            "operations": 1,
            "flops": flops,
            "traffic_bytes": bytes_,
        }
        for kind, flops, bytes_ in rows
    ]
    fields = {
        "forward_flops": sum(row["flops"] for row in work),
        "forward_traffic_bytes": sum(row["traffic_bytes"] for row in work),
    }
    return layer(name, 0, 0, **fields, work=work)


def rows_of(truth: DeviceType) -> list[Timed]:
    """Two models of layers that tell all figures apart, with times of a device."""
    told = [
        layer_of("product", ("product", 10**11, 10**6)),
        layer_of("thin", ("product", 10**6, 10**9)),
        layer_of("convolution", ("convolution", 10**11, 10**6)),
        layer_of("pointwise", ("convolution", 10**6, 10**9)),
        layer_of("small", ("convolution", 10**5, 10)),
        layer_of("attention", ("attention", 10**11, 10**6)),
        layer_of("norm", ("memory", 0, 10**9)),
    ]
    rows = []
    for group in ("one", "other"):
        for one in graph(told, []).record.layers:
            seconds = layer_times(one, "none", truth, "float32").forward_s
            rows.append(Timed(group, one.name, one, "float32", "F", seconds, 1 / len(told)))
    return rows


def test_a_fit_finds_the_figures_that_times_were_made_of() -> None:
    rows = rows_of(device_with(DEVICE, TRUTH))
    found = fit(rows, DEVICE)
    for name, value in TRUTH.items():
        assert found[name] == pytest.approx(value, rel=0.05), name
    told = errors(rows, device_with(DEVICE, found))
    assert told.worst < 0.05
    assert all(e.worst < 0.05 for e in left_out(rows, DEVICE).values())


def test_one_odd_layer_does_not_move_a_fit() -> None:
    rows = rows_of(device_with(DEVICE, TRUTH))
    odd = next(row for row in rows if row.group == "one" and row.name == "product")
    changed = Timed(**{**vars(odd), "measured_s": 50 * odd.measured_s, "share": 0.1})
    found = fit([changed if row is odd else row for row in rows], DEVICE)
    assert found["product"] == pytest.approx(TRUTH["product"], rel=0.1)


def test_errors_are_of_whole_models_and_of_noticeable_layers() -> None:
    truth = device_with(DEVICE, TRUTH)
    rows = [row for row in rows_of(truth) if row.name in ("product", "norm")]
    half = [Timed(**{**vars(r), "measured_s": r.measured_s / 2, "share": 0.5}) for r in rows[:1]]
    same = [Timed(**{**vars(r), "share": 0.5}) for r in rows[1:2]]
    hidden = [Timed(**{**vars(r), "measured_s": r.measured_s / 9, "share": 0.0}) for r in rows[:1]]
    found = errors([*half, *same, *hidden], truth)
    assert found.whole == {("one", "F"): pytest.approx(0.5 * 2 + 0.5 * 1 - 1)}
    assert (found.median, found.worst) == pytest.approx((0.5, 1))
    assert found.worst_name == "one: product, F"


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return measure(TINY, torch.device("cpu"), rounds=2)


def test_every_distinct_layer_is_measured_in_all_its_operations(samples: list[Sample]) -> None:
    names = [row.layer.name for row in samples]
    assert names == ["wte", "wpe", "drop", "h.0", "ln_f", "lm_head", "loss"]
    (block,) = (sample for sample in samples if sample.layer.name == "h.0")
    assert block.alike == 3
    assert all(set(row.seconds) == set("FBIW") and row.seconds["F"] > 0 for row in samples)
    shares = [(row.share, row.kind) for row in timed_rows(samples)]
    alike = [s.alike for s in samples for _ in "FB"]
    assert len(shares) == len(alike)
    assert sum(share for share, kind in shares if kind == "F") == pytest.approx(1)


def test_kept_times_are_read_again(samples: list[Sample], tmp_path: Path) -> None:
    save(samples, [TINY], "a test's machine", tmp_path / "times.json")
    machine, read = load(tmp_path / "times.json")
    assert machine == "a test's machine"
    assert read == samples


def test_times_of_another_file_or_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text('{"format": "pipeplan/1"}')
    with pytest.raises(PipeplanError, match="format"):
        load(tmp_path / "times.json")
    sample = Sample(TINY, graph([layer("h.9")]).record.layers[0], 1, dict.fromkeys("FBIW", 1.0))
    save([sample], [TINY], "none", tmp_path / "times.json")
    with pytest.raises(PipeplanError, match=r"no layer 'h\.9' any more"):
        load(tmp_path / "times.json")


def test_the_cpu_preset_is_within_its_stated_error_of_the_kept_times(tmp_path: Path) -> None:
    """Transformers: docs/costs.md says 20 % of a model's forward or backward."""
    data = json.loads((ROOT / "benchmarks" / "roofline" / "roofline_cpu.json").read_text())
    names = {"gpt_tiny", "llama_tiny", "bert_tiny", "t5_tiny", "mixtral_tiny"}
    data["cases"] = [row for row in data["cases"] if row["case"]["model"] in names]
    assert len(data["cases"]) == len(names)
    (tmp_path / "times.json").write_text(json.dumps(data))
    _, samples = load(tmp_path / "times.json")
    found = errors(timed_rows(samples), DEVICES["CPU-core"])
    assert max(abs(error) for error in found.whole.values()) < 0.2


def test_gpu_presets_are_within_their_stated_error_of_published_throughput() -> None:
    """docs/costs.md says 15 % on what was compared; the rows that cost least to trace."""
    rows = [row for row in PUBLISHED if row.model in ("3b", "resnet50") and row.samples != 10]
    assert {row.device for row in rows} == {"A100-80GB", "A100-40GB", "H100-80GB", "V100-16GB"}
    for row in rows:
        assert abs(math.log(predicted_s(row) / row.seconds)) < 0.15, row


def test_a_start_that_is_no_preset_is_refused() -> None:
    done = subprocess.run(
        [
            warm_python(),
            "-m",
            "benchmarks.roofline",
            "--device-type",
            "GTX-1",
            "--rows",
            "speed",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: --device-type 'GTX-1': choose from V100-16GB" in done.stderr
    assert set(START) == set(TRUTH)
