"""The page's colours, light and dark; styles and scripts have no others.

Boxes keep Okabe and Ito's fills in both schemes, so that charts look alike everywhere; what the
page's ground demands of contrast is in the edges and in the lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

from planner.report.figures import (
    ACTIVATION_COLOUR,
    ALL_REDUCE_COLOUR,
    GRADIENT_COLOUR,
    INK_COLOUR,
    KIND_COLOURS,
    OPTIMIZER_COLOUR,
)

BOX_INK = "#000000"
_BOXES = {
    **{f"box-{kind}": colour for kind, colour in KIND_COLOURS.items()},
    "box-ink": BOX_INK,
    "box-all-reduce": ALL_REDUCE_COLOUR,
    "box-optimizer": OPTIMIZER_COLOUR,
}
LIGHT: Mapping[str, str] = {
    "page": "#FFFFFF",
    "panel": "#F6F6F4",
    "ink": INK_COLOUR,
    "muted": "#5C6166",
    "rule": "#D9D9D5",
    "control": "#767B80",
    "accent": "#0B5CAD",
    "alert": "#A1260D",
    "track": "#EEEEEB",
    "path": INK_COLOUR,
    **_BOXES,
    "edge-F": "#1B6A99",
    "edge-B": "#8A5F00",
    "edge-I": "#8F3E00",
    "edge-W": "#7D7300",
    "edge-all-reduce": "#8E3F69",
    "edge-optimizer": "#00664A",
    "link-F": ACTIVATION_COLOUR,
    "link-B": GRADIENT_COLOUR,
    "link-ink": "#FFFFFF",
    "memory": "#A9CCE3",
    "memory-line": "#1B6A99",
}
DARK: Mapping[str, str] = {
    "page": "#14171A",
    "panel": "#1C2024",
    "ink": "#E8E6E1",
    "muted": "#A4A9AD",
    "rule": "#33383D",
    "control": "#80868C",
    "accent": "#79B8FF",
    "alert": "#FF9F85",
    "track": "#22272B",
    "path": "#FFFFFF",
    **_BOXES,
    "edge-F": "#14171A",
    "edge-B": "#14171A",
    "edge-I": "#14171A",
    "edge-W": "#14171A",
    "edge-all-reduce": "#14171A",
    "edge-optimizer": "#14171A",
    "link-F": "#4AA3DF",
    "link-B": "#CE8A53",
    "link-ink": "#000000",
    "memory": "#24506E",
    "memory-line": "#6DB9E8",
}
TEXTS: Sequence[tuple[str, str]] = (
    *((text, ground) for text in ("ink", "muted", "accent", "alert") for ground in ("page",)),
    *((text, "panel") for text in ("ink", "muted", "accent", "alert")),
    *((text, "track") for text in ("ink",)),
    *(("box-ink", f"box-{kind}") for kind in (*KIND_COLOURS, "all-reduce", "optimizer")),
    ("link-ink", "link-F"),
    ("link-ink", "link-B"),
)
"""Text and what it stands on: a contrast of at least :data:`LEAST_TEXT_CONTRAST`."""
SHAPES: Sequence[tuple[str, str]] = (
    *((line, "page") for line in ("control", "accent", "path", "link-F", "link-B", "memory-line")),
    ("path", "track"),
    ("memory-line", "track"),
)
"""Lines and what they stand on: a contrast of at least :data:`LEAST_SHAPE_CONTRAST`."""
LEAST_TEXT_CONTRAST = 4.5
LEAST_SHAPE_CONTRAST = 3.0
_FIRST_STAGE, _LAST_STAGE = "#D9EAF7", "#0A4A7D"


def style_sheet() -> str:
    """Both schemes as custom properties; print is light."""
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in scheme.items())
        for scheme in (LIGHT, DARK)
    )
    return (
        f":root{{{light}}}\n"
        "@media screen and (prefers-color-scheme:dark)"
        f"{{:root:not([data-print]){{{dark}}}}}\n"
    )


def stage_colours(place: int, count: int) -> tuple[str, str]:
    """Fill and ink of a stage: pale blue for the first, deep for the last.

    Args:
        place: of the stage, from 0.
        count: of all stages.
    """
    share = place / (count - 1) if count > 1 else 0.0
    fill = _between(_FIRST_STAGE, _LAST_STAGE, share)
    return fill, max((BOX_INK, "#FFFFFF"), key=lambda ink: contrast(ink, fill))


def contrast(first: str, second: str) -> float:
    """The contrast of two colours, 1 to 21, as WCAG 2.2 defines it.

    Args:
        first: as ``#RRGGBB``.
        second: the same.
    """
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def linear(colour: str) -> tuple[float, float, float]:
    """Red, green and blue of an sRGB colour in linear light, 0 to 1 (IEC 61966-2-1)."""
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
        for share in (value / 255 for value in _channels(colour))
    )
    return red, green, blue


def _luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))


def _between(first: str, last: str, share: float) -> str:
    """Mixed as light mixes, roughly: by squares."""
    pairs = zip(_channels(first), _channels(last), strict=True)
    mixed = (round(sqrt((1 - share) * a * a + share * b * b)) for a, b in pairs)
    return "#" + "".join(f"{value:02X}" for value in mixed)
