"""Plans for the HTML report, and its pages taken apart by Python's own parser."""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from planner.assembly import plan_by_hand
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.report.page import report_html
from planner.simulation.timeline import Timeline

VOID = {"meta", "link", "br", "hr", "img", "input"}


def plan_of(timeline: Timeline) -> Plan:
    """The plan that a timeline replays."""
    orders: dict[str, list[Operation]] = defaultdict(list)
    for event in timeline.operations:
        orders[event.device].append(event.operation)
    return plan_by_hand(timeline.pipeline, {name: tuple(rows) for name, rows in orders.items()})


@dataclass
class Node:
    """An element with its attributes, its children and the text directly in it."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Node"] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str | None = None) -> list["Node"]:
        """Elements below, in order."""
        found = []
        for child in self.children:
            found += [child] if tag in (None, child.tag) else []
            found += child.all(tag)
        return found

    def by_id(self, identifier: str) -> "Node":
        """The one element of this id."""
        (found,) = [node for node in self.all() if node.attributes.get("id") == identifier]
        return found

    @property
    def text(self) -> str:
        """All text in it, white space drawn together."""
        parts = [*self.texts, *(child.text for child in self.children)]
        return re.sub(r"\s+", " ", " ".join(parts)).strip()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].texts.append(data)


def parsed(page: str) -> Node:
    """The page's tree; every element that is not void is closed."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (root,) = parser.open
    return root


_pages: dict[int, tuple[Timeline, Node]] = {}
"""By the identity of the timeline, whose page many tests read."""


def page_of(timeline: Timeline, **arguments: Any) -> Node:
    """The parsed page of the plan that a timeline replays."""
    if arguments:
        return parsed(report_html(plan_of(timeline), **arguments))
    if id(timeline) not in _pages:
        _pages[id(timeline)] = timeline, parsed(report_html(plan_of(timeline)))
    return _pages[id(timeline)][1]
