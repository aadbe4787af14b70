"""``benchmarks.report_all`` on made benchmarks: one passes, one fails, one never ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report_all
from benchmarks.catalogue import BENCHMARKS, ROOM, Benchmark, full_report
from benchmarks.report_all import main
from benchmarks.reporting.page import page
from benchmarks.reporting.running import Ran, run

START = """
import os, signal, sys, time
path = sys.argv[sys.argv.index("--claims") + 1]
def say(claim, figure):
    line = '{"kind": "claim", "claim": "%s", "source": "made", "bar": 1.0, "figure": %s}'
    with open(path, "a") as file:
        file.write(line % (claim, figure) + "\\n")
"""
FAKES = {
    "fake_passes": "say('quick', 2.0); say('small', 0.5); print('on standard output')",
    "fake_fails": "say('begun', 1.0); raise ValueError('no such layer')",
    "fake_hangs": "say('waits', 1.0); time.sleep(600)",
    "fake_lies": "say('odd', 1.0); open(path, 'a').write('no claim\\n')",
    "fake_interrupts": "say('some', 1.0); os.kill(os.getppid(), signal.SIGINT); time.sleep(600)",
    "fake_echoes": "sys.exit(f'data: {sys.argv[1:3]}')",
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FAKES.items():
        (tmp_path / f"{name}.py").write_text(f"{START}\n{text}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def fake(name: str, limit_s: float = 120.0, **more: bool) -> Benchmark:
    return Benchmark(name, f"Is {name} well?", name, f"fake_{name}", f"{name}.md", limit_s, **more)


def line_of(text: str, part: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith("|") and part in line]
    return found


@pytest.mark.extensive
def test_a_page_has_what_each_benchmark_found_however_it_ended(fakes: Path) -> None:
    report, lines = fakes / "REPORT.md", fakes / "claims.jsonl"
    rows = [fake("passes"), fake("fails"), fake("hangs", limit_s=8.0), fake("lies")]
    assert main(["--output", str(report), "--jsonl", str(lines)], rows) == 1
    text = report.read_text()
    assert "**3 claims reached, 1 not reached, 0 not run, 0 without a bar.**" in text
    assert "- passes: small: 0.5, bar >= 1" in text
    assert line_of(text, "| quick | made |").endswith("| 2 | reached | passes.md: none yet |")
    assert "| **not reached** |" in line_of(text, "| small | made |")
    # What failed keeps the claims it had, and says why it has no more.
    assert "| reached |" in line_of(text, "| begun | made |")
    told = "failed: status 1: ValueError: no such layer"
    assert told in line_of(text, "the rest of fails")
    assert f"- fails: {told}" in text
    assert "| reached |" in line_of(text, "| waits | made |")
    assert "failed: stopped after its limit of 8 s" in line_of(text, "the rest of hangs")
    # A line that is no claim makes none of the file count.
    assert "failed: claims.jsonl:2:" in line_of(text, "all of lies")
    assert len(lines.read_text().splitlines()) == 4


def test_ctrl_c_keeps_what_there_is(fakes: Path) -> None:
    report = fakes / "REPORT.md"
    script = fakes / "runner.py"
    script.write_text(
        "import sys\n"
        "from benchmarks.report_all import main\n"
        "from benchmarks.catalogue import Benchmark as B\n"
        "names = ('passes', 'interrupts', 'fails')\n"
        "rows = [B(n, 'Well?', n, f'fake_{n}', f'{n}.md', 120.0) for n in names]\n"
        f"sys.exit(main(['--output', {str(report)!r}], rows))\n"
    )
    path = os.pathsep.join((str(ROOM.parent), str(fakes)))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    text = report.read_text()
    assert "| reached |" in line_of(text, "| quick | made |")
    assert "| reached |" in line_of(text, "| some | made |")
    assert "failed: interrupted" in line_of(text, "the rest of interrupts")
    assert "not run: interrupted before" in line_of(text, "all of fails")


def test_a_part_is_printed_and_leaves_the_whole_page_alone(
    fakes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fakes / "REPORT.md"
    monkeypatch.setattr(report_all, "REPORT", whole)
    rows = [fake("passes"), fake("fails")]
    assert main(["--rows", "passes"], rows) == 0
    told = capsys.readouterr().out
    assert "| reached |" in line_of(told, "| quick | made |")
    assert "--rows passes" in told
    assert "fails" not in told
    assert not whole.exists()
    assert main([], rows[:1]) == 0
    assert "| reached |" in line_of(whole.read_text(), "| quick | made |")


def test_only_those_that_take_data_are_given_it(fakes: Path) -> None:
    report = fakes / "REPORT.md"
    rows = [fake("echoes", takes_data=True)]
    assert main(["--output", str(report), "--data", str(fakes)], rows) == 1
    assert f"data: ['--data', '{fakes}']" in report.read_text()
    rows = [fake("echoes")]
    assert main(["--output", str(report), "--data", str(fakes)], rows) == 1
    assert "data: ['--claims', " in report.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "no/such"], "--data no/such: no such folder"),
        (["--rows", "pases"], "--rows: pases is not known; choose from passes"),
        (["--output", "no/such/REPORT.md"], "no/such/REPORT.md: cannot be written"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, [fake("passes")]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert "[1 of" not in told


def test_the_page_says_how_busy_the_machine_was_and_what_is_still_to_come() -> None:
    rows = [fake("passes"), fake("fails")]
    quiet = page("made", rows, {"passes": Ran("ran", (), 10.0, 0.01)}, 60.0)
    assert "Other jobs kept 0.01 cores busy meanwhile." in quiet
    assert "not run: not yet" in line_of(quiet, "all of fails")
    runs = {"passes": Ran("ran", (), 30.0, 0.0), "fails": Ran("ran", (), 10.0, 2.0)}
    assert "**Other jobs kept 0.50 cores busy meanwhile: " in page("made", rows, runs, 60.0)
    unknown = page("made", rows, {"passes": Ran("ran", (), 10.0, None)}, 60.0)
    assert "is not known" in unknown


def test_a_full_report_tells_its_date_and_what_it_missed(tmp_path: Path) -> None:
    row = fake("passes")
    assert full_report(row, tmp_path) is None
    path = tmp_path / row.report
    path.write_text("# Passes\n\nNo heading.\n")
    assert full_report(row, tmp_path) is None
    made = "Made by `python -m passes` on {}; 2 cores.\n"
    text = made.format("2026-01-31") + "| NOT reached |\n| **not reached** |\n| reached |\n"
    path.write_text(text + made.format("2026-02-01"))
    found = full_report(row, tmp_path)
    assert found is not None
    assert (found.date, found.missed, found.has_verdicts) == ("2026-02-01", 2, True)
    text = page("made", [row], {}, 0.0, tmp_path)
    assert "| [passes.md](passes.md), 2026-02-01 | 2 times |" in text


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_every_benchmark_of_the_catalogue_is_there(benchmark: Benchmark) -> None:
    assert full_report(benchmark) is not None
    for words in (benchmark.short, benchmark.command):
        module = ROOM.parent / words.split()[0].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
    assert "--short" in benchmark.short
    assert re.fullmatch(r"[a-z_]+", benchmark.name)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_the_published_page_has_every_benchmark_or_says_which_it_lacks(
    benchmark: Benchmark,
) -> None:
    text = report_all.REPORT.read_text()
    if f"\n## {benchmark.name}\n" not in text:
        before = text.partition("## What is claimed")[0]
        assert f"`{benchmark.name}`" in before
        assert f"]({benchmark.report})" in before


@pytest.mark.extensive
def test_a_benchmark_that_was_stopped_leaves_no_process(fakes: Path) -> None:
    pid = fakes / "pid"
    (fakes / "fake_parent.py").write_text(
        f"{START}\nimport subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\nchild.wait()\n"
    )
    found = run(["fake_parent"], limit_s=6.0, grace_s=5.0)
    assert found.status == "failed: stopped after its limit of 6 s"
    # Orphans are reaped by whoever adopts them: a zombie is as good as gone.
    stat = Path("/proc") / pid.read_text() / "stat"
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
