"""The cluster as a picture with the stages on its devices, and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from planner.cluster.cluster import Cluster, Link
from planner.plan.operations import compress_devices, stages_label
from planner.report.html.colours import stage_colours
from planner.report.html.markup import Child, Column, code, details, node, section, table
from planner.report.html.topology_layout import (
    CELL_HEIGHT,
    CELL_WIDTH,
    MOST_ARCS,
    MOST_LETTERS,
    Card,
    Layout,
    layout,
)
from planner.simulation.timeline import Timeline
from planner.units import plural

_MARGIN = 12.0
_NAME_LETTERS = 11
# What a line needs between two cards to start at their edges.
_ROOM = 40.0
# Beyond so many lines only those of an uncommon bandwidth say theirs.
_MOST_LABELS = 16
_LINKS = (
    Column("from"),
    Column("to"),
    Column("GB/s each way", True),
    Column("latency µs", True),
    Column("kind"),
    Column("figures"),
)
Point = tuple[float, float]


def topology_section(timeline: Timeline) -> Element:
    """Return the picture in a scrolling frame, and a table of its links."""
    cluster = timeline.pipeline.problem.cluster
    found = layout(cluster)
    picture = node(
        "div",
        topology_picture(timeline, found),
        class_="frame picture",
        role="region",
        tabindex=0,
        aria_label="Picture of the cluster",
    )
    usual = _usual_bandwidth(cluster, found)
    note = (
        "A box is a switch with its devices; s3 in a device is stage 3; earlier stages are paler. "
        "Dashed devices hold no stage." + (f" Lines without a label have {usual}." if usual else "")
    )
    links = details(
        f"Table of {plural(len(cluster.links), 'link')}",
        table("Links", _LINKS, [_link_row(link) for link in cluster.links], most=2000),
    )
    return section("topology", "Cluster", node("p", note, class_="note"), picture, links)


def topology_picture(timeline: Timeline, found: Layout) -> Element:
    """An SVG of devices, switches and links; a description of it all is its text alternative."""
    cluster = timeline.pipeline.problem.cluster
    cards = found.cards
    width = max(card.x + card.width for card in cards.values()) + 2 * _MARGIN
    height = max(card.y + card.height for card in cards.values()) + 2 * _MARGIN
    picture = node(
        "svg",
        node("title", f"The cluster {cluster.name}"),
        node("desc", _description(timeline)),
        *_lines(cluster, found),
        *(_frame(cluster, card) for card in cards.values() if card.is_switch),
        *_arcs(cluster, cards),
        *(
            _cell(timeline, card, place)
            for card in cards.values()
            for place in range(len(card.devices))
        ),
        role="img",
        width=f"{width:g}",
        height=f"{height:g}",
    )
    picture.set("viewBox", f"{-_MARGIN:g} {-_MARGIN:g} {width:g} {height:g}")
    return picture


def _description(timeline: Timeline) -> str:
    pipeline = timeline.pipeline
    held = (
        f"{compress_devices(stage.spec.devices)} hold{'s' * (len(stage.spec.devices) == 1)} "
        f"stage {index}"
        for index, stage in enumerate(pipeline.stages)
    )
    cluster = pipeline.problem.cluster
    return (
        f"{plural(len(cluster.devices), 'device')}, {plural(len(cluster.switches), 'switch', 'es')}"
        f" and {plural(len(cluster.links), 'link')}; {'; '.join(held)}."
    )


# --- cards ----------------------------------------------------------------------------------------


def _frame(cluster: Cluster, card: Card) -> Element:
    box = node("rect", x=card.x, y=card.y, width=card.width, height=card.height, rx=3)
    box.set("class", "switch")
    title = _text(_short(card.name, MOST_LETTERS), (card.x + 8, card.y + 14), "switch-name")
    inside = _text(_inside(cluster, card), (card.x + 8, card.y + 27), "bandwidth")
    return node("g", node("title", f"switch {card.name}"), box, title, inside)


def _inside(cluster: Cluster, card: Card) -> str:
    """Return what joins the card's devices to its switch, and to each other."""
    inside = [link for link in cluster.links if all(end in _members(card) for end in link.between)]
    own = [link for link in inside if card.name in link.between]
    arcs = [link for link in inside if card.name not in link.between]
    words = [f"each {_bandwidths(own)}"] if own else []
    if len(arcs) > MOST_ARCS:
        words.append(f"{len(arcs):,} among them {_bandwidths(arcs)}")
    return ", ".join(words)


def _members(card: Card) -> frozenset[str]:
    return frozenset((card.name, *card.devices))


def _cell(timeline: Timeline, card: Card, place: int) -> Element:
    device = card.devices[place]
    stages = timeline.pipeline.stages_on.get(device, ())
    kind = timeline.pipeline.problem.cluster.type_of(device)
    x, y = card.cell(place)
    fill, ink = stage_colours(stages[0], len(timeline.pipeline.stages)) if stages else ("", "")
    box = node("rect", x=x, y=y, width=CELL_WIDTH, height=CELL_HEIGHT, rx=2)
    box.set("class", "device" if stages else "device idle")
    name = device.removeprefix(f"{card.name}/")
    texts = [
        _text(_short(name, _NAME_LETTERS), (x + 6, y + 13), "device-name"),
        _text(_short(_stage_word(stages), _NAME_LETTERS), (x + 6, y + 27), "device-stage"),
    ]
    for shape in (box, *texts) if stages else ():
        shape.set("fill", fill if shape is box else ink)
    holds = stages_label(stages) if stages else "holds no stage"
    return node("g", node("title", f"{device}: {kind}, {holds}"), box, *texts)


def _stage_word(stages: Sequence[int]) -> str:
    return "s" + compress_devices(map(str, stages)).replace(" ", "") if stages else "idle"


# --- links ----------------------------------------------------------------------------------------


def _lines(cluster: Cluster, found: Layout) -> Iterator[Element]:
    """Links between cards, parallel ones as one line; then their bandwidths, over all lines."""
    card_of, usual = _homes(found.cards), _usual_bandwidth(cluster, found)
    labels: list[Element] = []
    for first, second, links in _between(cluster, found):
        ends = sorted((_end(first, card_of), _end(second, card_of)), key=lambda end: end[1][0])
        text = _bandwidths(links)
        drawn, at, place = (_elbow if found.is_forest else _straight)(*ends)
        yield _link(drawn, links)
        if text != usual:
            labels.append(_text(text, at, f"bandwidth {place}"))
    yield from labels


def _usual_bandwidth(cluster: Cluster, found: Layout) -> str | None:
    """Return the bandwidth of most lines, if there are too many lines to label all."""
    texts = Counter(_bandwidths(links) for _, _, links in _between(cluster, found))
    return texts.most_common(1)[0][0] if texts.total() > _MOST_LABELS else None


def _between(cluster: Cluster, found: Layout) -> Iterator[tuple[str, str, list[Link]]]:
    card_of = _homes(found.cards)
    for (first, second), links in _pairs(cluster).items():
        if card_of[first] is not card_of[second]:
            yield first, second, links


def _arcs(cluster: Cluster, cards: Mapping[str, Card]) -> Iterator[Element]:
    """Links among the devices of a card, where they are few."""
    card_of = _homes(cards)
    inside: dict[str, list[tuple[Point, Point, list[Link]]]] = {}
    for (first, second), links in _pairs(cluster).items():
        if card_of[first] is card_of[second] and not {first, second} & set(cards):
            ends = _end(first, card_of)[1], _end(second, card_of)[1]
            inside.setdefault(card_of[first].name, []).append((*ends, links))
    for arcs in inside.values():
        if len(arcs) <= MOST_ARCS:
            yield from (_arc(*arc) for arc in arcs)


def _pairs(cluster: Cluster) -> dict[tuple[str, str], list[Link]]:
    pairs: dict[tuple[str, str], list[Link]] = {}
    for link in cluster.links:
        first, second = sorted(link.between)
        pairs.setdefault((first, second), []).append(link)
    return pairs


def _homes(cards: Mapping[str, Card]) -> dict[str, Card]:
    """The card of every device and switch."""
    cells = {device: card for card in cards.values() for device in card.devices}
    return {**cells, **cards}


def _end(name: str, card_of: Mapping[str, Card]) -> tuple[Card, Point]:
    """The card of an end of a link, and the middle of its cell, or of the card for a switch."""
    card = card_of[name]
    if name in card.devices:
        x, y = card.cell(card.devices.index(name))
        return card, (x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2)
    return card, (card.x + card.width / 2, card.y + card.height / 2)


def _elbow(left: tuple[Card, Point], right: tuple[Card, Point]) -> tuple[str, Point, str]:
    """Return a path from edge to edge with right angles, where there is room.

    Returns:
        What to draw, where its label stands, and how that is aligned.
    """
    (start, a), (end, b) = (left[0].x + left[0].width, left[1]), (right[0].x, right[1])
    if end <= start:
        return _straight(left, right)
    drawn = f"M{start:g},{a[1]:g} H{start + min((end - start) / 2, 24.0):g} V{b[1]:g} H{end:g}"
    return drawn, (end - 5, b[1] - 4), "end"


def _straight(left: tuple[Card, Point], right: tuple[Card, Point]) -> tuple[str, Point, str]:
    """Return a path from edge to edge where there is room, else from middle to middle."""
    a, b = left[1], right[1]
    if right[0].x - left[0].x - left[0].width > _ROOM:
        a, b = (left[0].x + left[0].width, a[1]), (right[0].x, b[1])
    drawn = f"M{a[0]:g},{a[1]:g} L{b[0]:g},{b[1]:g}"
    return drawn, ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2 - 3), "mid"


def _arc(a: Point, b: Point, links: Sequence[Link]) -> Element:
    """Below two cells of a card, from one to the other, with its bandwidth."""
    low = max(a[1], b[1]) + CELL_HEIGHT / 2 + 7
    drawn = _link(f"M{a[0]:g},{a[1]:g} V{low:g} H{b[0]:g} V{b[1]:g}", links)
    at = ((a[0] + b[0]) / 2, low + 11)
    return node("g", drawn, _text(_bandwidths(links), at, "bandwidth inside"))


def _link(drawn: str, links: Sequence[Link]) -> Element:
    """A line that tells, when pointed at, what it stands for."""
    words = "; ".join(_link_words(link) for link in links)
    title = node("title", f"{' and '.join(links[0].between)}: {words}")
    return node("g", title, node("path", d=drawn, class_="link"))


def _bandwidths(links: Sequence[Link]) -> str:
    """One figure or the range; parallel links between the same ends are counted."""
    values = sorted({link.bandwidth_gb_per_s for link in links})
    text = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
    count = len(links) if len({frozenset(link.between) for link in links}) == 1 else 1
    return f"{count} x {text} GB/s" if count > 1 else f"{text} GB/s"


def _link_words(link: Link) -> str:
    return f"{link.bandwidth_gb_per_s:g} GB/s, {link.latency_us:g} µs, {_link_kind(link)}"


def _link_kind(link: Link) -> str:
    return "shared" if link.shared else f"{link.duplex} duplex"


def _link_row(link: Link) -> list[Child]:
    first, second = link.between
    figures = (f"{link.bandwidth_gb_per_s:g}", f"{link.latency_us:g}")
    return [code(first), code(second), *figures, _link_kind(link), str(link.source)]


def _text(text: str, at: Point, class_: str) -> Element:
    return node("text", text, x=f"{at[0]:g}", y=f"{at[1]:g}", class_=class_)


def _short(text: str, letters: int) -> str:
    """The end of a name tells most."""
    return text if len(text) <= letters else "…" + text[1 - letters :]
