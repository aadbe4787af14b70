"""The page in a browser: keys, zoom, no error, no request, no overflow, dark and narrow."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import graph, layer, orders, pipeline, star
from html_pages import plan_of
from measured_runs import run_of

from planner.plan.operations import KIND_LABELS
from planner.report.html.colours import DARK, LIGHT
from planner.report.html.page import save_report
from planner.report.replicas import charted_together
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline
from planner.units import format_seconds

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.extensive,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium on the PATH; have one with: apt-get install chromium"
    ),
]

FOCUSED = "e => document.activeElement === e"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = ["--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    # Root has no sandbox of Chromium's.
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as starter:
        opened = starter.chromium.launch(executable_path=BROWSER, args=options)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a timeline's page; in the end there must be no error and no request but the file."""
    problems: list[str] = []
    contexts = []

    def open_(timeline: Timeline, *, width: int = 1200, height: int = 900, **options: Any) -> Any:
        measured = options.pop("measured", None)
        path = tmp_path / "plan.html"
        save_report(plan_of(timeline), path, measured=measured)
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda message: heard(message.text))
        page.on("request", lambda request: note(request.url))
        page.goto(path.as_uri())
        return page

    def heard(text: str) -> None:
        # A hint at what reading pixels costs, which only these tests do.
        if "getImageData" not in text:
            problems.append(f"console: {text}")

    def note(url: str) -> None:
        if url != (tmp_path / "plan.html").as_uri():
            problems.append(f"request: {url}")

    yield open_
    for context in contexts:
        context.close()
    assert problems == []


def span(page: Any) -> float:
    """How much time is in view, in the unit that the page shows."""
    first, last = (float(part.split()[0]) for part in page.inner_text("#range").split(" to "))
    return last - first


def start(page: Any) -> float:
    return float(page.inner_text("#range").split()[0])


def settled(page: Any) -> None:
    page.evaluate("() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")


def pixels(page: Any, host: str, x: float, y: float, width: int = 1) -> list[tuple[int, int, int]]:
    """Colours of a line of canvas pixels."""
    settled(page)
    values = page.evaluate(
        "([host, x, y, width]) => [...document.querySelector(`${host} canvas`)"
        ".getContext('2d').getImageData(x, y, width, 1).data]",
        [host, x, y, width],
    )
    return [tuple(values[at : at + 3]) for at in range(0, len(values), 4)]


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def test_every_shape_of_plan_opens_without_an_error_or_a_request(timeline, open_page):
    page = open_page(timeline, measured=run_of(plan_of(timeline)))
    assert page.inner_text("#range").endswith(" s")
    assert page.locator("#legend li").count() >= 3
    rows = page.evaluate("() => document.querySelector('#gantt > div').clientHeight")
    assert rows > 60 * len(timeline.pipeline.devices)


def test_plus_and_minus_zoom_and_arrows_pan(timeline_of, open_page):
    page = open_page(timeline_of("replicated"))
    whole = span(page)
    page.focus("#gantt")
    page.keyboard.press("+")
    page.keyboard.press("+")
    near, at = span(page), start(page)
    assert near == pytest.approx(whole / 1.6**2, rel=0.01)
    page.keyboard.press("ArrowRight")
    assert start(page) == pytest.approx(at + 0.15 * near, rel=0.02)
    assert span(page) == pytest.approx(near, rel=0.01)
    page.keyboard.press("ArrowLeft")
    assert start(page) == pytest.approx(at, rel=0.02)
    page.keyboard.press("-")
    assert span(page) == pytest.approx(near * 1.6, rel=0.01)
    page.keyboard.press("Home")
    assert start(page) == 0
    page.keyboard.press("End")
    assert start(page) == pytest.approx(whole - span(page), rel=0.01)
    page.keyboard.press("0")
    assert span(page) == pytest.approx(whole)
    for _ in range(100):
        page.keyboard.press("+")
    assert 0 < span(page) < whole / 1e5


def test_the_view_never_leaves_the_iteration(timeline_of, open_page):
    page = open_page(timeline_of("replicated"))
    whole = span(page)
    page.focus("#memory-chart")
    for key in ("ArrowLeft", "-", "ArrowRight", "+", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert start(page) == 0
    assert span(page) == pytest.approx(whole / 1.6, rel=0.01)


def test_shift_and_arrows_step_through_operations_and_tell_each(timeline_of, open_page):
    timeline = timeline_of("interleaved")
    page = open_page(timeline)
    page.focus("#gantt")
    first, second = timeline.pipeline.devices[:2]
    runs = {name: [e for e in timeline.operations if e.device == name] for name in (first, second)}
    page.keyboard.press("Shift+ArrowRight")
    for event in runs[first]:
        told = page.inner_text("#readout")
        stage, kind, microbatch = event.operation
        assert told.startswith(f"{event.operation} · {KIND_LABELS[kind]} of stage {stage}, ")
        assert f"microbatch {microbatch} · {first}" in told
        assert f"{format_seconds(event.end_s - event.start_s)} long" in told
        assert page.text_content("#spoken") == told
        page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    assert f" · {second} · " in page.inner_text("#readout")
    page.keyboard.press("Escape")
    assert page.inner_text("#readout").startswith("Point at something")


def test_c_walks_the_critical_path_from_its_start_to_its_end(timeline_of, open_page):
    timeline = timeline_of("replicated")
    page = open_page(timeline)
    page.focus("#gantt")
    told = []
    while True:
        page.keyboard.press("c")
        if told and page.inner_text("#readout") == told[-1]:
            break
        told.append(page.inner_text("#readout"))
    assert all("critical path" in line for line in told)
    assert "its start" in told[0]
    assert told[-1].startswith("optimizer step on")
    lengths = [re.search(r", ([\d.,]+) (s|ms|µs) long", line).groups() for line in told]
    units = {"s": 1, "ms": 1e-3, "µs": 1e-6}
    total = sum(float(value.replace(",", "")) * units[unit] for value, unit in lengths)
    assert total == pytest.approx(timeline.iteration_time_s, rel=1e-3)


def test_an_operation_is_found_by_its_name(timeline_of, open_page):
    page = open_page(timeline_of("split_backward"))
    page.fill("#find-operation", "1w1")
    page.keyboard.press("Enter")
    assert page.inner_text("#readout").startswith("1W1 · weight gradient of stage 1, microbatch 1")
    page.fill("#find-operation", "9F9")
    page.click("text=Find")
    assert "no operation 9F9" in page.inner_text("#readout")
    assert "no operation 9F9" in page.text_content("#spoken")


def test_a_pointer_reads_selects_drags_and_zooms(timeline_of, open_page):
    timeline = timeline_of("replicated")
    page = open_page(timeline)
    box = page.locator("#gantt").bounding_box()
    page.locator("#gantt").scroll_into_view_if_needed()
    box = page.locator("#gantt").bounding_box()
    page.mouse.move(box["x"] + 175, box["y"] + 42)
    assert page.inner_text("#readout").startswith("0F0 · forward of stage 0, microbatch 0 · d0")
    page.mouse.click(box["x"] + 175, box["y"] + 42)
    page.mouse.move(box["x"] + 20, box["y"] + 400)
    assert page.inner_text("#readout").startswith("0F0")
    whole = span(page)
    page.mouse.move(box["x"] + 600, box["y"] + 42)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function(f"() => document.querySelector('#range').textContent !== '{whole}'")
    settled(page)
    near, at = span(page), start(page)
    assert near < whole
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 42, steps=4)
    page.mouse.up()
    assert start(page) > at
    assert span(page) == pytest.approx(near, rel=0.01)


def test_tab_reaches_everything_interactive_and_shows_where_it_is(timeline_of, open_page):
    page = open_page(timeline_of("replicated"), measured=run_of(plan_of(timeline_of("replicated"))))
    page.evaluate(
        "() => document.querySelectorAll('a, button, input, select, summary, [tabindex]')"
        ".forEach((e, i) => e.dataset.number = i)"
    )
    expected = set(
        page.evaluate(
            "() => [...document.querySelectorAll('[data-number]')]"
            ".filter(e => e.checkVisibility() && !e.disabled)"
            # Of radio buttons Tab reaches the one that is chosen, arrows the others.
            ".filter(e => e.type !== 'radio' || e.checked).map(e => e.dataset.number)"
        )
    )
    reached = set()
    for _ in range(len(expected) + 5):
        page.keyboard.press("Tab")
        number, outline, colour = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.dataset.number, s.outlineStyle, s.outlineWidth]; }"
        )
        if number is not None:
            reached.add(number)
            assert outline == "solid"
            assert colour == "2px"
    assert expected <= reached


def test_the_page_is_as_wide_as_its_window_from_360_pixels_on(timeline_of, open_page):
    for width in (360, 768, 1920):
        page = open_page(timeline_of("replicated"), width=width)
        page.evaluate("() => document.querySelectorAll('details').forEach(d => (d.open = true))")
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        assert page.evaluate("() => document.querySelector('#gantt canvas').clientWidth") <= width


@pytest.mark.parametrize(("scheme", "colours"), [("light", LIGHT), ("dark", DARK)])
def test_charts_and_page_follow_the_scheme(timeline_of, open_page, scheme, colours):
    page = open_page(timeline_of("replicated"), color_scheme=scheme)
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert ground == f"rgb{rgb(colours['page'])}"
    for host in ("#gantt", "#memory-chart"):
        page.locator(host).scroll_into_view_if_needed()
        assert pixels(page, host, 1, 1) == [rgb(colours["page"])]
    other = "light" if scheme == "dark" else "dark"
    page.emulate_media(color_scheme=other)
    expected = rgb((DARK if other == "dark" else LIGHT)["page"])
    assert pixels(page, "#gantt", 1, 1) == [expected]


def test_print_is_dark_on_light_and_shows_all_rows(timeline_of, open_page):
    page = open_page(timeline_of("replicated"), color_scheme="dark")
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    assert pixels(page, "#gantt", 1, 1) == [rgb(LIGHT["page"])]
    high = page.evaluate("() => document.querySelector('#gantt > div').clientHeight")
    assert page.evaluate("() => document.querySelector('#gantt canvas').clientHeight") == high
    page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    assert pixels(page, "#gantt", 1, 1) == [rgb(DARK["page"])]
    assert len(page.pdf()) > 10_000


def dense() -> Timeline:
    """A device that runs forward and backward in turn, 3,000 times, of 1 and 2 seconds."""
    placed = pipeline(graph([layer("a")]), star(1), [(("a",), ("d0",))], microbatches=3000)
    text = " ".join(f"0F{number} 0B{number}" for number in range(3000))
    return simulate(placed, orders(d0=text))


def test_pixels_with_many_operations_are_their_mix(open_page):
    page = open_page(dense())
    page.uncheck("#show-path")
    width = page.evaluate("() => document.querySelector('#gantt').clientWidth")
    found = pixels(page, "#gantt", 200, 26 + 12, width - 220)
    forward, backward = rgb(LIGHT["box-F"]), rgb(LIGHT["box-B"])
    mean = [sum(pixel[channel] for pixel in found) / len(found) for channel in range(3)]
    mixed = [a / 3 + 2 * b / 3 for a, b in zip(forward, backward, strict=True)]
    assert mean == pytest.approx(mixed, abs=2)


def test_boxes_have_their_kinds_colours_where_they_are_wide(timeline_of, open_page):
    timeline = timeline_of("one_device")
    page = open_page(timeline)
    page.uncheck("#show-path")
    width = page.evaluate("() => document.querySelector('#gantt').clientWidth")
    for event in timeline.operations:
        share = (0.9 * event.start_s + 0.1 * event.end_s) / timeline.iteration_time_s
        (found,) = pixels(page, "#gantt", round(168 + share * (width - 168)), 26 + 7)
        assert found == rgb(LIGHT[f"box-{event.operation.kind}"])


def test_the_table_has_the_operations_in_view_a_page_at_a_time(open_page):
    page = open_page(dense())
    page.click("#view-table summary")
    rows = page.locator("#table-rows tr")
    shown = page.locator("#table-range")
    # The page draws when it comes to it; these wait for that.
    expect(rows).to_have_count(50)
    expect(shown).to_have_text("1 to 50 of 6000")
    page.click("#table-after")
    expect(shown).to_have_text("51 to 100 of 6000")
    assert rows.first.inner_text().split()[:2] == ["0F25", "forward"]
    page.focus("#gantt")
    for _ in range(14):
        page.keyboard.press("+")
    expect(rows).not_to_have_count(50)
    assert page.inner_text("#table-range").startswith("1 to ")
    assert rows.count() < 50


def test_switches_hide_links_and_what_was_measured(timeline_of, open_page):
    timeline = timeline_of("replicated")
    page = open_page(timeline, measured=run_of(plan_of(timeline)))

    def high() -> int:
        return page.evaluate("() => document.querySelector('#gantt > div').clientHeight")

    everything = high()
    page.uncheck("#show-links")
    without_links = high()
    page.uncheck("#show-measured")
    assert high() < without_links < everything
    page.check("#show-links")
    page.check("#show-measured")
    assert high() == everything


def test_replicas_alike_share_a_row_until_one_of_them_is_asked_for(many_replicas, open_page):
    page = open_page(many_replicas)

    def rows() -> float:
        """Without links there are an axis of 26 pixels, rows of 32 each, and 6 below."""
        high = page.evaluate("() => document.querySelector('#gantt > div').clientHeight")
        return (high - 32) / 32

    page.uncheck("#show-links")
    together = charted_together(many_replicas)
    assert rows() == len(together)
    page.uncheck("#show-alike")
    assert rows() == 32
    page.check("#show-alike")
    hidden = next(e for e in many_replicas.operations if e.device not in together)
    page.fill("#find-operation", str(hidden.operation))
    page.keyboard.press("Enter")
    assert f" · {hidden.device} · " in page.inner_text("#readout")
    assert rows() == 32


def test_without_scripts_the_tables_and_the_picture_are_there(timeline_of, open_page):
    page = open_page(timeline_of("replicated"), java_script_enabled=False)
    assert page.locator("noscript").is_visible()
    assert page.locator("#stages table").first.is_visible()
    assert page.locator("#topology svg").is_visible()


def test_the_page_may_not_reach_the_network(timeline_of, browser, tmp_path):
    save_report(plan_of(timeline_of("one_device")), tmp_path / "plan.html")
    page = browser.new_page()
    failed: list[str] = []
    finished: list[str] = []
    page.on("requestfailed", lambda request: failed.append(request.failure))
    page.on("requestfinished", lambda request: finished.append(request.url))
    page.goto((tmp_path / "plan.html").as_uri())
    refused = page.evaluate(
        "async () => { const seen = [];"
        " document.addEventListener('securitypolicyviolation',"
        " event => seen.push(event.violatedDirective));"
        " await fetch('https://example.invalid/').catch(() => 0);"
        " const image = new Image(); image.src = 'https://example.invalid/a.png';"
        " const script = document.createElement('script'); script.textContent = 'window.ran = 1';"
        " document.body.append(image, script);"
        " await new Promise(r => setTimeout(r, 300)); return [seen, window.ran]; }"
    )
    page.close()
    assert {"connect-src", "img-src", "script-src-elem"} <= set(refused[0])
    assert refused[1] is None
    assert set(failed) <= {"csp"}
    assert all(url.startswith("file:") for url in finished)
