"""`python -m benchmarks.schedule --instance FILE --json`, and the made instances."""

import json
from pathlib import Path

import pytest

from benchmarks.schedule import __main__ as schedule
from benchmarks.schedule.instances import chunks, uneven, zero_bubble
from planner.search.schedule.bounds.windows import iteration_bound_s

ROW = {
    "stages": 3,
    "microbatches": 4,
    "forward": 10,
    "backward_input": 12,
    "backward_weight": 8,
    "communication": 1,
    "stash_forward": 10,
    "stash_kept_until_weight": 4,
    "zero_bubble_heuristic_cap_1p": {"makespan": 1000, "longest_stage_span": 900},
}
KEYS = {
    *("instance", "stages", "microbatches", "cap", "objective"),
    *("value", "lower_bound", "best_classic", "reference", "seconds"),
}


def test_a_line_for_each_cap_and_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instances.json"
    path.write_text(json.dumps({"note": "made", "instances": [ROW]}))
    assert schedule.main(["--instance", str(path), "--time-limit", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [set(row) for row in rows] == [KEYS] * 4
    assert [(row["cap"], row["objective"]) for row in rows] == [
        *(("1p", "makespan"), ("1p", "longest_stage_span")),
        *(("2p", "makespan"), ("2p", "longest_stage_span")),
    ]
    assert [row["reference"] for row in rows] == [1000, 900, None, None]
    for row in rows:
        assert 4 * 30 <= row["lower_bound"] <= row["value"] + 1e-6
        assert row["value"] <= row["best_classic"] + 1e-6
    # The longest span is part of the iteration, and more memory never hurts a proved optimum.
    assert rows[1]["value"] <= rows[0]["value"]
    assert rows[2]["lower_bound"] <= rows[0]["value"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"instances": []}, "instances: expected a list of at least one instance"),
        ([], "instances: expected a list"),
        ({"instances": [{**ROW, "forward": None}]}, "instances[0].forward: expected a number"),
        ({"instances": [{**ROW, "stages": -1}]}, "instances[0].stages: expected a number"),
    ],
)
def test_a_wrong_file_is_told(
    data: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(data))
    assert schedule.main(["--instance", str(path), "--json"]) == 1
    assert said in capsys.readouterr().err


def test_made_instances_are_what_they_say() -> None:
    pipe = uneven(4, 8, "1f1b", 1, whole=True).pipeline()
    limits = [pipe.stash_limit(s, f"d{s}") for s in range(4)]
    assert limits == [4, 3, 2, 1]
    assert uneven(4, 8, "double", 1).pipeline().stash_limit(0, "d0") == 8
    assert pipe.forward_transfer(0, "d0", "d1").seconds == pytest.approx(
        pipe.backward_transfer(1, "d1", "d0").seconds
    )
    assert chunks(4, 8, "v", 1).pipeline().stages_on["d0"] == (0, 7)
    assert chunks(4, 8, "interleaved", 1).pipeline().stages_on["d0"] == (0, 4)
    # The published heuristic of this public instance is optimal.
    row = {**ROW, "stages": 4, "microbatches": 8, "forward": 6, "backward_input": 4}
    row |= {"backward_weight": 4, "stash_forward": 303104, "stash_kept_until_weight": 131072}
    bound_s = iteration_bound_s(zero_bubble(row, 1).pipeline(), split=True)
    assert bound_s == pytest.approx(142e-6)
