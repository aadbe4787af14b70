"""Hooks of MkDocs: generated pages, pages from elsewhere in the repository, and links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifact_pages import artifact_page
from command_pages import command_page
from mkdocs.structure.files import File, Files
from preset_pages import preset_page
from repository_links import site_links

ROOT = Path(__file__).parents[2]
MADE = {"commands.md": command_page, "artifacts.md": artifact_page, "presets.md": preset_page}
ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/*.md")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, make in MADE.items():
        files.append(File.generated(config, name, content=make()))
    for pattern in ELSEWHERE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Convert the links of a page."""
    published = {_source(file.src_uri): file.src_uri for file in files.documentation_pages()}
    return site_links(markdown, _source(page.file.src_uri), published)


def _source(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return uri if (ROOT / uri).is_file() else f"docs/{uri}"
