"""Contrast and colour-blindness of the page's palette, in numbers."""

from itertools import combinations
from math import dist

import pytest

from planner.report.html.colours import (
    DARK,
    LEAST_SHAPE_CONTRAST,
    LEAST_TEXT_CONTRAST,
    LIGHT,
    SHAPES,
    TEXTS,
    contrast,
    linear,
    stage_colours,
    style_sheet,
)

SCHEMES = {"light": LIGHT, "dark": DARK}
BOXES = ("box-F", "box-B", "box-I", "box-W", "box-all-reduce", "box-optimizer")
# Machado, Oliveira and Fernandes 2009, severity 1: on linear red, green and blue.
PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
SAME = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def lab(colour: str, sight: tuple) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of a colour as somebody sees it."""
    seen = [sum(w * v for w, v in zip(row, linear(colour), strict=True)) for row in sight]
    red, green, blue = (min(1.0, max(0.0, value)) for value in seen)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_contrast_is_that_of_the_published_examples():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.005)
    assert contrast("#0000FF", "#FFFFFF") == pytest.approx(8.59, abs=0.005)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_readable_on_what_it_stands_on(scheme):
    colours = SCHEMES[scheme]
    for text, ground in TEXTS:
        assert contrast(colours[text], colours[ground]) >= LEAST_TEXT_CONTRAST, (text, ground)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lines_and_boxes_stand_out_from_the_page(scheme):
    colours = SCHEMES[scheme]
    for shape, ground in SHAPES:
        assert contrast(colours[shape], colours[ground]) >= LEAST_SHAPE_CONTRAST, (shape, ground)
    for box in BOXES:
        # A box stands out by its fill or by its edge.
        seen = (colours[box], colours[box.replace("box", "edge")])
        for ground in ("page", "track"):
            assert max(contrast(c, colours[ground]) for c in seen) >= LEAST_SHAPE_CONTRAST, box


@pytest.mark.parametrize("sight", [SAME, PROTANOPIA, DEUTERANOPIA])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kinds_are_told_apart_by_the_colour_blind(scheme, sight):
    colours = SCHEMES[scheme]
    pairs = [*combinations(BOXES, 2), ("link-F", "link-B")]
    for first, second in pairs:
        apart = dist(lab(colours[first], sight), lab(colours[second], sight))
        assert apart >= 12, (first, second)  # 2.3 is a just noticeable difference.


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_stages_are_numbered_readably_and_grow_darker(count):
    pairs = [stage_colours(place, count) for place in range(count)]
    assert all(contrast(ink, fill) >= LEAST_TEXT_CONTRAST for fill, ink in pairs)
    lightness = [contrast(fill, "#000000") for fill, _ in pairs]
    assert lightness == sorted(lightness, reverse=True)


def test_both_schemes_have_the_same_names_and_are_in_the_style_sheet():
    assert set(LIGHT) == set(DARK)
    assert "prefers-color-scheme:dark" in style_sheet()
    for scheme in SCHEMES.values():
        assert all(f"--{name}:{colour};" in style_sheet() for name, colour in scheme.items())
