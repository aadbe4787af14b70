"""A measured timeline survives its file, which is a Chrome trace; anything else is refused."""

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PipeplanError
from planner.measured.timeline import MeasuredTimeline

NAMES = ("d0", "n0/gpu1", "d-2")
nanoseconds = st.integers(0, 10**10)


@st.composite
def spans(draw: st.DrawFn, steps: int) -> dict[str, Any]:
    start, length = draw(nanoseconds), draw(nanoseconds)
    step = draw(st.integers(1, steps))
    return {"step": step, "start_s": start / 1e9, "end_s": (start + length) / 1e9}


def once(rows: list[dict], *fields: str) -> list[dict]:
    """Of rows equal in these fields the last."""
    return list(
        {tuple(map(str, (row[f] for f in ("step", *fields)))): row for row in rows}.values()
    )


@st.composite
def measured_timelines(draw: st.DrawFn) -> MeasuredTimeline:
    names, steps = NAMES[: draw(st.integers(1, 3))], draw(st.integers(1, 4))
    device = st.sampled_from(names)
    sizes = st.integers(0, 2**62)

    def rows(**fields: Any) -> list[dict]:
        extra = st.fixed_dictionaries(fields)
        pairs = draw(st.lists(st.tuples(spans(steps), extra), max_size=8))
        return [{**span, **more} for span, more in pairs]

    numbers = st.integers(0, 9999)
    text = st.builds("{}{}{}".format, numbers, st.sampled_from("FBIW"), numbers)
    sent = st.builds("{}{}{}".format, numbers, st.sampled_from("FB"), numbers)
    transfers = rows(source=device, target=device, operation=sent, bytes=sizes)
    stages = st.lists(st.integers(0, 9), min_size=1, max_size=3)
    reductions = rows(device=device, stages=stages, bytes=sizes)
    peaks = st.dictionaries(device, sizes, max_size=3)
    return MeasuredTimeline.parse(
        {
            "plan_digest": "sha256:0",
            "model": draw(st.text(min_size=1, max_size=5)),
            "cluster": "by-hand",
            "emulated": draw(st.booleans()),
            "backend": draw(st.sampled_from(["gloo", "nccl"])),
            "devices": [
                {"name": name, "rank": rank, "hardware": draw(st.text(min_size=1, max_size=9))}
                for rank, name in enumerate(names)
            ],
            "steps": [
                {
                    "step": step,
                    "iteration_time_s": draw(nanoseconds) / 1e9,
                    "peak_memory_bytes": draw(peaks),
                }
                for step in range(1, steps + 1)
            ],
            "operations": once(rows(device=device, operation=text), "operation"),
            "transfers": once(
                [row for row in transfers if row["source"] != row["target"]],
                *("source", "target", "operation"),
            ),
            "reductions": once(reductions, "device", "stages"),
            "optimizer_steps": once(rows(device=device), "device"),
        },
        "drawn",
    )


@given(measured_timelines())
def test_a_timeline_survives_its_file(timeline: MeasuredTimeline) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        timeline.save(path)
        assert MeasuredTimeline.load(path) == timeline
        assert json.loads(path.read_text()).items() >= timeline.trace().items()


@given(measured_timelines())
def test_steps_follow_each_other_and_threads_of_links_hold_one_message_at_a_time(
    timeline: MeasuredTimeline,
) -> None:
    threads, steps = defaultdict(list), defaultdict(list)
    for event in timeline.trace()["traceEvents"]:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"])
            steps[event["args"]["step"]].append(span)
            if event["cat"] == "transfer":
                threads[event["pid"], event["tid"]].append(span)
    for rows in threads.values():
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(sorted(rows)))
    ends = [max(end for _, end in steps[step]) for step in sorted(steps)]
    starts = [min(start for start, _ in steps[step]) for step in sorted(steps)]
    assert all(a <= b + 1e-3 for a, b in zip(ends, starts[1:], strict=False))


def small() -> dict[str, Any]:
    """One step of two devices, as plain data."""
    return {
        "plan_digest": "sha256:0",
        "model": "m",
        "cluster": "c",
        "emulated": False,
        "backend": "gloo",
        "devices": [
            {"name": "d1", "rank": 1, "hardware": "CPU"},
            {"name": "d0", "rank": 0, "hardware": "CPU"},
        ],
        "steps": [{"step": 1, "iteration_time_s": 1.0, "peak_memory_bytes": {"d0": 7}}],
        "operations": [
            {"step": 1, "device": "d0", "operation": "0F0", "start_s": 0.0, "end_s": 0.25},
            {"step": 1, "device": "d1", "operation": "1F0", "start_s": 0.5, "end_s": 0.75},
        ],
        "transfers": [
            {
                **{"step": 1, "source": "d0", "target": "d1", "operation": "0F0"},
                **{"bytes": 10, "start_s": 0.25, "end_s": 0.5},
            }
        ],
        "reductions": [
            {**{"step": 1, "device": "d0", "stages": [0], "bytes": 4}, "start_s": 0.8, "end_s": 0.9}
        ],
        "optimizer_steps": [{"step": 1, "device": "d0", "start_s": 0.9, "end_s": 1.0}],
    }


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda d: d["operations"][0].update(end_s=-1.0), "operations[0].end_s: expected at least"),
        (lambda d: d["operations"][1].update(end_s=0.1), "end_s: 0.1 is before start_s 0.5"),
        (lambda d: d["operations"][0].update(operation="0X0"), "expected an operation such as"),
        (lambda d: d["operations"][0].update(device="d7"), "operations: device 'd7' is not in"),
        (lambda d: d["operations"][0].update(step=2), "operations: step 2 is not in steps"),
        (lambda d: d["operations"][0].update(step=0), "operations[0].step: expected at least 1"),
        (lambda d: d["operations"].append(d["operations"][0]), "operations: 2 of them are of"),
        (lambda d: d["transfers"].append(d["transfers"][0]), "transfers: 2 of them are of"),
        (lambda d: d["transfers"][0].update(operation="0W0"), "transfers: operation '0W0' hands"),
        (
            lambda d: d["transfers"][0].update(target="d0"),
            "transfers: one goes from 'd0' to itself",
        ),
        (lambda d: d["transfers"][0].update(bytes=2**63), "transfers[0].bytes: "),
        (lambda d: d["devices"].pop(), "devices: rank 0 is missing"),
        (lambda d: d["devices"][0].update(name="d0"), "devices: 2 of them are of 'd0'"),
        (
            lambda d: d["steps"][0].update(peak_memory_bytes={"x": 1}),
            "steps: peak_memory_bytes 'x'",
        ),
        (lambda d: d["steps"].clear(), "steps: expected 1 or more of them"),
        (lambda d: d["reductions"][0].update(stages=[]), "reductions[0].stages: expected 1 or"),
        (lambda d: d.update(backend="smoke"), "backend: expected 'gloo' or 'nccl'"),
        (lambda d: d.pop("emulated"), "emulated: this field is missing"),
    ],
)
def test_wrong_events_are_named(edit: Callable[[dict], object], named: str) -> None:
    data = small()
    edit(data)
    with pytest.raises(PipeplanError) as raised:
        MeasuredTimeline.parse(data, "made")
    assert any(named in problem for problem in raised.value.problems), raised.value


def test_devices_and_events_are_kept_in_order() -> None:
    data = small()
    data["operations"].reverse()
    timeline = MeasuredTimeline.parse(data, "made")
    assert [device.name for device in timeline.devices] == ["d0", "d1"]
    assert [event.operation for event in timeline.operations] == ["0F0", "1F0"]
    assert timeline.transfers[0].what == (0, "F", 0)
    assert timeline.transfers[0].seconds == 0.25


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object with a field 'format'"),
        ('{"format": "pipeplan/1"}', "this is a plan, give a measured timeline"),
        ('{"format": "pipeplan-timeline/3"}', "upgrade Pipeplan"),
        ('{"format": "pipeplan-timeline/1"}', "torchrun -m executor PLAN --timeline FILE"),
        ('{"traceEvents": []}', "the prediction that `pipeplan simulate --trace` writes"),
        ('{"format": "pipeplan-timeline/2"}', "timeline: expected the measured events"),
        ('{"format": "pipeplan-timeline/2", "steps": []}', "steps: unknown field"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(PipeplanError) as raised:
        MeasuredTimeline.load(path)
    assert any(str(path) in line and named in line for line in raised.value.problems)


def test_the_first_of_three_steps_warms_up() -> None:
    data = small()

    def counted(steps: int) -> tuple[int, ...]:
        rows = [{"step": step, "iteration_time_s": 1.0} for step in range(1, steps + 1)]
        return MeasuredTimeline.parse(data | {"steps": rows}, "made").counted_steps

    assert [counted(steps) for steps in (1, 2, 3)] == [(1,), (1, 2), (2, 3)]
