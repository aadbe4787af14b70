"""Pipeplan as its wheel installs it: built from its sdist, in a venv of its own, offline.

Everything else comes from the environment of the tests, whose packages the venv sees after its own.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
_PACKAGES = ("planner", "executor", "models", "benchmarks", "tests")
_SDIST = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"


@dataclass(frozen=True)
class Installed:
    """An installation, and an empty folder outside of any checkout to work in.

    Attributes:
        sdist, wheel: the files that were built.
        python: of the virtual environment.
        folder: to run in.
    """

    sdist: Path
    wheel: Path
    python: Path
    folder: Path

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run the venv's Python."""
        return _run([self.python, *words], self.folder)

    def pipeplan(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run the entry point."""
        return _run([self.python.with_name("pipeplan"), *words], self.folder)


def install(folder: Path) -> Installed:
    """Build and install below a folder."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        shutil.copy(ROOT / name, source)
    for name in _PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    _checked([sys.executable, "-c", _SDIST], source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--quiet"]
    _checked([*pip, "wheel", ".", *offline, "--no-build-isolation", "-w", folder], unpacked)
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    _checked([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    _checked([*pip, "--python", python, "install", *offline, wheel], folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Behind its own packages; what is installed there by a .pth of its own is not seen.
    (site / "tests_own.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (folder / "work").mkdir()
    return Installed(sdist, wheel, python, folder / "work")


def _run(words: Sequence[object], folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _checked(words: Sequence[object], folder: Path) -> None:
    made = _run(words, folder)
    assert made.returncode == 0, made.stdout + made.stderr
