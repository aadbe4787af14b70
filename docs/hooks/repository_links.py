"""Conversion of links between files of the repository to links of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def site_links(text: str, source: str, published: Mapping[str, str]) -> str:
    """Return a page with its relative links converted.

    A link to a file that is not on the site (code, examples) becomes plain text.

    Args:
        text: the page, as Markdown.
        source: path of the page in the repository.
        published: pages of the site, by their paths in the repository.
    """
    pieces, end = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_turned(text[end : fence.start()], source, published), fence[0]]
        end = fence.end()
    return "".join([*pieces, _turned(text[end:], source, published)])


def _turned(text: str, source: str, published: Mapping[str, str]) -> str:
    own = posixpath.dirname(published[source])

    def turn(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, mark, anchor = target.partition("#")
        if ":" in path or not path:
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if there in published:
            return f"[{words}]({posixpath.relpath(published[there], own or '.')}{mark}{anchor})"
        # Inside docs/ a wrong link is the build's to find.
        return match[0] if there.startswith("docs/") else words

    return _LINK.sub(turn, text)
