"""The site: builds without a warning, needs nothing from elsewhere, and leaves nothing out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import ROOT
from typer.testing import CliRunner

from executor.launch.train_schema import TRAIN
from planner.cli.commands import app
from planner.schemas import ARTIFACTS, Artifact, json_schema

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
from artifact_pages import artifact_page
from command_pages import command_page
from repository_links import site_links

ASSET = re.compile(r"<(?:script|link|img|iframe|source|object)\b[^>]*>")
REMOTE = re.compile(r"""(?:src|href|data)\s*=\s*["']?(?:https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("folder", ["docs", "benchmarks"])
def test_every_page_is_in_the_navigation(folder: str) -> None:
    """Building the site says so too, but takes too long for the quick tier."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    prefix = "benchmarks/" if folder == "benchmarks" else ""
    for page in (ROOT / folder).glob("*.md"):
        assert re.search(rf": {prefix}{page.name}$", navigation, re.MULTILINE), page.name


@pytest.mark.extensive
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        remote = [tag for tag in ASSET.findall(page.read_text()) if REMOTE.search(tag)]
        assert not remote, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", sheet.read_text()), sheet


def sections(page: str, level: str) -> dict[str, str]:
    parts = re.split(rf"^{level} (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_of_commands_has_every_option_of_every_help() -> None:
    found = sections(command_page(), "##")
    names = commands()
    assert {"plan", "profile", "import", "simulate"} <= set(names)
    for name in names:
        text = found[f"pipeplan {name}"]
        # profile hands its words on to a process of its own.
        words = ["--output"] if name == "profile" else help_options(name)
        for option in words:
            assert f"`{option}`" in text, f"{name} {option}"


def shown_help(name: str) -> str:
    return CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"}).output


def commands(group: str = "") -> list[str]:
    """The commands that a help page lists, with those of the groups among them."""
    listed = shown_help(group).partition("─ Commands ")[2]
    names = [
        f"{group} {name}".strip() for name in re.findall(r"^│ ([a-z]+) ", listed, re.MULTILINE)
    ]
    return [command for name in names for command in (commands(name) or [name])]


def help_options(name: str) -> set[str]:
    text = shown_help(name)
    return set(re.findall(r"^│ \*?\s*(--[a-z][a-z-]*)", text, re.MULTILINE)) - {"--help"}


def test_the_page_of_commands_has_the_executor_s_options() -> None:
    text = sections(command_page(), "##")["python -m executor"]
    for option in ("--config", "--resume", "--sync", "--inject", "--timeline"):
        assert f"`{option}`" in text


@pytest.mark.parametrize("artifact", [*ARTIFACTS.values(), TRAIN], ids=lambda row: row.format)
def test_the_page_of_files_has_every_field_with_its_meaning(artifact: Artifact) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|.*\| (.+) \|$", artifact_page(), re.MULTILINE)
    told = {name for name, kind, meaning in rows if kind.strip() and meaning.strip()}
    # Problems may have fields that no file has.
    assert json_schema(artifact)["properties"].keys() - {"$schema"} <= told


def test_no_field_is_without_a_meaning() -> None:
    rows = [line for line in artifact_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert not [row for row in rows if re.search(r"\|\s*\|$", row)]


def test_links_lead_where_the_site_has_their_targets() -> None:
    published = {
        "docs/a.md": "a.md",
        "docs/b.md": "b.md",
        "benchmarks/X.md": "benchmarks/X.md",
        "CHANGELOG.md": "CHANGELOG.md",
    }
    text = "[x](../benchmarks/X.md#y) [b](b.md) [code](../planner/x.py) [w](https://w.org) [t](#t)"
    assert site_links(text, "docs/a.md", published) == (
        "[x](benchmarks/X.md#y) [b](b.md) code [w](https://w.org) [t](#t)"
    )
    assert site_links("[a](../docs/a.md)", "benchmarks/X.md", published) == "[a](../a.md)"
    assert site_links("[a](docs/a.md)", "CHANGELOG.md", published) == "[a](a.md)"


def test_links_inside_fences_and_wrong_ones_stay() -> None:
    text = "```\n[x](../planner/x.py)\n```\n[gone](gone.md)"
    assert site_links(text, "docs/a.md", {"docs/a.md": "a.md"}) == text
