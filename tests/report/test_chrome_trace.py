"""The trace holds every event of the timeline, where and when it happened."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from planner.errors import PipeplanError
from planner.report.chrome_trace import chrome_trace, save_chrome_trace

NANOSECOND_IN_MICROSECONDS = 1e-3


def named(trace: dict, kind: str) -> dict:
    """What the metadata events of one kind call processes or threads."""
    key = (lambda e: (e["pid"], e["tid"])) if kind == "thread_name" else (lambda e: e["pid"])
    return {key(e): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == kind}


def complete(trace: dict, process: str, thread: str) -> list[dict]:
    """Complete events of one thread; ``process`` is the start of its name."""
    processes, threads = named(trace, "process_name"), named(trace, "thread_name")
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X"
        and processes[event["pid"]].split()[0] == process
        and threads[event["pid"], event["tid"]] == thread
    ]


def close(event: dict, start_s: float, end_s: float) -> bool:
    return event["ts"] == pytest.approx(start_s * 1e6, abs=NANOSECOND_IN_MICROSECONDS) and event[
        "ts"
    ] + event["dur"] == pytest.approx(end_s * 1e6, abs=NANOSECOND_IN_MICROSECONDS)


def test_every_operation_appears_once_when_and_where_it_ran(timeline):
    trace = chrome_trace(timeline)
    for device in timeline.pipeline.devices:
        expected = {str(e.operation): e for e in timeline.operations if e.device == device}
        found = complete(trace, device, "compute")
        assert sorted(event["name"] for event in found) == sorted(expected)
        for event in found:
            source = expected[event["name"]]
            assert close(event, source.start_s, source.end_s)
            assert event["args"] == {
                "stage": source.operation.stage,
                "kind": source.operation.kind,
                "microbatch": source.operation.microbatch,
            }


def test_complete_events_of_a_thread_do_not_overlap(timeline):
    threads = defaultdict(list)
    for event in chrome_trace(timeline)["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3)
            threads[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1e3)))
    for spans in threads.values():
        ordered = sorted(spans)
        for (_, end), (start, _) in pairwise(ordered):
            assert end <= start


def test_every_device_ends_with_its_optimizer_step(timeline):
    trace = chrome_trace(timeline)
    for device, end_s in timeline.end_s.items():
        *_, last = complete(trace, device, "all-reduce and optimizer")
        assert last["name"] == "optimizer step"
        assert close(last, end_s - timeline.pipeline.optimizer_s[device], end_s)


def test_an_all_reduce_appears_on_every_device_that_takes_part(timeline_of):
    timeline = timeline_of("replicated")
    trace = chrome_trace(timeline)
    buckets = timeline.synchronisations
    assert {bucket.synchronisation.devices for bucket in buckets} == {("d0", "d1")}
    for device in ("d0", "d1"):
        *shown, _ = complete(trace, device, "all-reduce and optimizer")
        for event, bucket in zip(shown, buckets, strict=True):
            assert close(event, bucket.start_s, bucket.end_s)
    assert len(complete(trace, "d2", "all-reduce and optimizer")) == 1


def test_a_transfer_appears_on_every_link_it_holds(timeline_of):
    timeline = timeline_of("replicated")
    trace = chrome_trace(timeline)
    threads = {name for name in named(trace, "thread_name").values() if "link" in name}
    expected = {f"d{i}>hub (link {i})" for i in range(3)} | {
        f"hub>d{i} (link {i})" for i in range(3)
    }
    # Activations for d2 share its link; of its gradients no two are on their way at once.
    assert threads == expected | {"hub>d2 (link 2, 2)"}
    sent = complete(trace, "links", "d2>hub (link 2)")
    assert [event["name"] for event in sent] == [
        f"1B{e.operation.microbatch}" for e in timeline.transfers if e.source == "d2"
    ]
    assert all(event["args"]["bytes"] == 10**8 for event in sent)
    assert all(event["dur"] == pytest.approx(0.1e6) for event in sent)


def test_a_half_duplex_link_is_one_thread_for_each_message_at_once(timeline_of):
    trace = chrome_trace(timeline_of("half_duplex"))
    threads = {name for name in named(trace, "thread_name").values() if "link" in name}
    assert threads == {*(f"d{i}-hub (link {i})" for i in range(3)), "d2-hub (link 2, 2)"}


def test_overlapping_transfers_over_shared_links_all_appear(timeline_of):
    timeline = timeline_of("shared_links")
    ordered = [e for e in timeline.transfers if e.source == "d0"]
    assert any(a.end_s > b.start_s for a, b in pairwise(ordered))
    trace = chrome_trace(timeline)
    found = [e for e in trace["traceEvents"] if e.get("cat") == "transfer"]
    assert len(found) == len(timeline.transfers)


def test_counters_give_the_memory_of_every_device(timeline):
    trace = chrome_trace(timeline)
    processes = named(trace, "process_name")
    counters = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counters[processes[event["pid"]].split()[0]].append(event["args"]["bytes"])
    expected = {device: [held for _, held in steps] for device, steps in timeline.memory.items()}
    assert counters == expected


def test_events_are_in_order_of_time_and_every_thread_has_a_name(timeline):
    trace = chrome_trace(timeline)
    times = [event["ts"] for event in trace["traceEvents"]]
    assert times == sorted(times)
    assert trace["displayTimeUnit"] == "ms"
    threads = named(trace, "thread_name")
    assert {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"} <= set(threads)


def test_the_file_holds_the_same_trace(timeline, tmp_path):
    path = tmp_path / "trace.json"
    save_chrome_trace(timeline, path)
    assert json.loads(path.read_text(encoding="utf-8")) == chrome_trace(timeline)


def test_a_missing_folder_is_a_user_error(timeline_of, tmp_path):
    with pytest.raises(PipeplanError, match="cannot be written"):
        save_chrome_trace(timeline_of("one_device"), tmp_path / "missing" / "trace.json")
