"""What shells complete: asked in their own words, and by the shells themselves where there are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from planner.cluster.presets import DEVICES
from planner.interop.export.exported import TARGETS
from planner.search.partition.baselines import BASELINES
from planner.sync.strategies import OPTIONS

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry point as an installation writes it."""
    path = tmp_path_factory.mktemp("bin") / "pipeplan"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'pipeplan'\n"
        "from planner.cli import main\nmain()\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plan.json").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "a.json").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.toml").touch()
    return tmp_path


def environment(command: Path, **more: str) -> dict[str, str]:
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}


def completed(command: Path, shell: str, line: str, folder: Path) -> set[str]:
    """The answers, in each shell's protocol; zsh's are an expression of quoted words."""
    words = line.split()
    asked = {
        "bash": {
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) if line.endswith(" ") else len(words) - 1),
        },
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    found = subprocess.run(
        [command],
        env=environment(command, _PIPEPLAN_COMPLETE=f"complete_{shell}", **asked),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stderr == ""
    if shell == "zsh":
        return set(found.stdout.split('"')[1::2])
    return set(found.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_export_targets(command: Path, shell: str, folder: Path) -> None:
    assert completed(command, shell, "pipeplan export plan.json --to ", folder) == set(TARGETS)


@pytest.mark.extensive
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pipeplan verify ", {"plan.json", "sweep/a.json", "empty/"}),
        ("pipeplan verify sweep/", {"sweep/a.json"}),
        ("pipeplan plan MODEL --cluster j", {"job.toml"}),
        ("pipeplan simulate plan.json --sync ", {*OPTIONS, "all", "choose"}),
        ("pipeplan plan MODEL --sync ", {*OPTIONS, "choose"}),
        ("pipeplan compare --planners ", set(BASELINES)),
        ("pipeplan compare --planners spp,da", {"spp,dapple"}),
        (
            "pipeplan import topo.txt --device-type A100",
            {name for name in DEVICES if name.startswith("A100")},
        ),
        ("pipeplan sweep --bill m", {"machines"}),
        ("pipeplan verify nothing-like-it", set()),
    ],
)
def test_names_and_files_are_completed(
    line: str, expected: set[str], command: Path, folder: Path
) -> None:
    assert completed(command, "bash", line, folder) == expected


def test_a_planner_is_not_offered_twice(command: Path, folder: Path) -> None:
    found = completed(command, "bash", "pipeplan compare --planners spp,", folder)
    assert found == {f"spp,{name}" for name in BASELINES if name != "spp"}


def script(command: Path, shell: str) -> str:
    # Asks for a shell by name, which is otherwise told from the process that called.
    asked = environment(command, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    return subprocess.run(
        [command, "--show-completion", shell],
        env=asked,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


_ASK = {
    "bash": "COMP_WORDS=(pipeplan export --to mega); COMP_CWORD=3\n"
    '_pipeplan_completion pipeplan; echo "${COMPREPLY[@]}"',
    "fish": "complete -C 'pipeplan export --to mega'",
    # Its completion runs in its line editor only: what the script defines stands in for it.
    "zsh": "",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_takes_the_script(shell: str, command: Path, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    before = "compdef() { echo $1 }\nwords=(pipeplan export --to mega)\nCURRENT=4\n"
    after = "_arguments() { echo $@ }\n_pipeplan_completion\n"
    text = script(command, shell)
    text = f"{before}{text}\n{after}" if shell == "zsh" else f"{text}\n{_ASK[shell]}\n"
    (tmp_path / "script").write_text(text)
    found = subprocess.run(
        [program, *(["-f"] if shell == "zsh" else []), tmp_path / "script"],
        env=environment(command, HOME=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "megatron" in found.stdout, found.stderr
    assert "deepspeed" not in found.stdout.split()


def test_completion_loads_neither_torch_nor_a_solver() -> None:
    code = (
        "import sys\nfrom planner.cli import completion\n"
        "for complete in (completion.planners, completion.strategies, completion.device_types,\n"
        "                 completion.export_targets, completion.import_formats): complete('')\n"
        "print([name for name in ('torch', 'ortools') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"
