"""The benchmark of GPUs, in its short form on the CPU: no minute of a GPU is lost on its faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO

import pytest
from warm_python import warm_python

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import worker
from benchmarks.gpu.cases import Case, Shape, all_cases
from benchmarks.gpu.report import ended_in, running_in, write_page
from executor.launch import model as launched
from planner.verification import verify

TESTS = Path(__file__).parent.parent
EXECUTOR = TESTS / "executor"


def run_here(
    words: Sequence[str], cases: Sequence[Case], journal: Path, errors: TextIO, until_s: float
) -> str | None:
    """One rank in this process, several as forks of one: each import of torch takes seconds."""
    if cases[0].ranks == 1:
        worker.main(worker.Batch(**json.loads(Path(words[-1]).read_text())))
        return None
    folder = Path(words[-1]).parent
    script = folder / "worker.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from benchmarks.gpu.worker import Batch, main\n"
        "main(Batch(**json.loads(Path(sys.argv[2]).read_text())))\n"
    )
    told = [script, folder, words[-1]]
    done = subprocess.run(
        [warm_python(), EXECUTOR / "forked_ranks.py", str(cases[0].ranks), *told],
        stderr=errors,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    return None if done.returncode == 0 else f"failed with status {done.returncode}"


@pytest.mark.extensive
def test_the_short_form_runs_every_section_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "watched", run_here)
    monkeypatch.syspath_prepend(str(EXECUTOR))
    shared = import_module("exports").SharedExports()
    monkeypatch.setattr(launched, "export_step", shared.export)
    monkeypatch.setattr(launched, "nodes_with_gradient", shared.gradients)
    page = tmp_path / "GPU.md"
    words = ["--short", "--output", str(page)]
    assert gpu.main(words) == 0
    rows = ended_in(page.with_suffix(".jsonl"))
    cases = all_cases(short=True, gpus=0)
    assert set(rows) == {case.key for case in cases}
    assert [row for row in rows.values() if "error" in row] == []
    assert rows["parity: two stages"]["losses"] == pytest.approx(
        rows["parity: one rank: gpt_tiny"]["losses"], rel=1e-5
    )
    assert rows["checkpoint: from the CPU to the device and back"]["cpu to cpu"] == 0
    text = page.read_text()
    assert all(case.name in text for case in cases)
    # What the journal has is not run again.
    monkeypatch.setattr(gpu, "watched", None)
    assert gpu.main(words) == 0


@pytest.mark.extensive
def test_cases_of_one_rank_and_of_several_run_as_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other cases run as forks, above."""
    chosen = ("environment: versions and devices", "parity: two stages")
    every = {case.key: case for case in all_cases(short=True, gpus=0)}
    monkeypatch.setattr(gpu, "all_cases", lambda *_: [every[key] for key in chosen])
    page = tmp_path / "GPU.md"
    assert gpu.main(["--short", "--output", str(page)]) == 0
    rows = ended_in(page.with_suffix(".jsonl"))
    assert set(rows) == set(chosen)
    assert [row for row in rows.values() if "error" in row] == []


def test_a_case_that_hangs_or_fails_is_noted_and_ended(tmp_path: Path) -> None:
    journal, told = tmp_path / "GPU.jsonl", tmp_path / "batch.json"
    case = Case("hangs", "for ever", limit_s=0.3)
    line = json.dumps({"begin": case.key})
    begin = f"open({str(journal)!r}, 'a').write({line!r} + chr(10))"
    until_s = time.monotonic() + 600
    with (tmp_path / "errors.txt").open("w") as errors:
        sleep = [sys.executable, "-c", f"{begin}; import time; time.sleep(600)", str(told)]
        assert gpu.watched(sleep, [case], journal, errors, until_s) == "hung for 0.3 s"
        assert running_in(journal) == case.key
        fail = [sys.executable, "-c", "raise ValueError('no such thing')", str(told)]
        assert gpu.watched(fail, [case], journal, errors, until_s) == "failed with status 1"
        late = [sys.executable, "-c", "import time; time.sleep(600)", str(told)]
        assert gpu.watched(late, [case], journal, errors, 0.0) == "stopped, as the time was up"
    assert gpu._last(tmp_path / "errors.txt") == "ValueError: no such thing"


def test_the_report_is_made_of_what_a_kill_has_left(tmp_path: Path) -> None:
    journal, page = tmp_path / "GPU.jsonl", tmp_path / "GPU.md"
    shape = Shape("gpt_tiny", ("0",))
    cases = [Case("models", name, shape, reference="right") for name in ("right", "wrong", "lost")]
    figures = {"step_s": [1.0, 2.0], "predicted_s": 1.5, "peak_bytes": 2**30}
    figures |= {"predicted_bytes": 2**29}
    rows = [
        {"begin": "models: right"},
        {"end": "models: right", "losses": [2.0, 1.0], **figures},
        {"begin": "models: wrong"},
        {"end": "models: wrong", "losses": [2.0, 1.1], **figures},
        {"begin": "models: lost"},
    ]
    journal.write_text("\n".join(map(json.dumps, rows)) + '\n{"end": "models: lo')
    assert running_in(journal) == "models: lost"
    write_page(page, cases, ended_in(journal), "python -m benchmarks.gpu")
    lines = page.read_text().splitlines()
    assert "| wrong | 1 | ran | 1.0e-01 | 2.0000 | 1.5000 | 1.000 | 0.500 |" in lines
    assert any(line.startswith("| lost | 1 | not run |") for line in lines)


@pytest.mark.parametrize("gpus", [0, 2, 3, 8])
def test_every_case_has_a_name_of_its_own_and_fits_the_machine(gpus: int) -> None:
    cases = all_cases(short=False, gpus=gpus)
    keys = [case.key for case in cases]
    assert len(set(keys)) == len(keys)
    references = {f"{case.section}: {case.reference}" for case in cases if case.reference}
    assert references <= set(keys)
    batched = [case.key for batch in gpu.batches(cases, short=False) for case in batch]
    assert sorted(batched) == sorted(keys)
    if gpus >= 2:
        assert cases[0].section == "hangs" or gpus == 2
        several = cases[: next(k for k, c in enumerate(cases) if c.section == "environment")]
        assert max(case.ranks for case in several) <= gpus


@pytest.mark.parametrize(
    "stages", [("0", "1", "0", "1"), ("0", "1", "1", "0"), ("01", "2", "3", "01"), ("01", "23")]
)
def test_plans_of_shapes_hold(stages: tuple[str, ...]) -> None:
    assert verify(Shape("gpt_tiny", stages, 3, split=True).plan()) == []
