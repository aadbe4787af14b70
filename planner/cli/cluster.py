"""``pipeplan cluster``: what is done with cluster files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.import_ import DEFAULT_CLUSTER_OUTPUT, require_cluster_path
from planner.cli.options import JsonOption
from planner.cli.output import print_json, say, show, user_errors
from planner.errors import PipeplanError
from planner.units import plural

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster
    from planner.cluster.merge import MergedBox

app = typer.Typer(no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Work with cluster files."""


FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="cluster files of two boxes or more",
    ),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network",
        metavar="LINK",
        help="link from each card to the network: a preset (InfiniBand-NDR, Ethernet-25G), or "
        "a bandwidth each way (100gbit, 12.5GB/s)",
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(
        "--latency-us", min=0, help="latency of that link (default: the preset's, else 20)"
    ),
]
PrefixesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prefix",
        metavar="NAME",
        help="rename the devices of a file to NAME/…; once for each file, in their order "
        "(default: the file's name, for devices whose names have no /)",
    ),
]
CardsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--card",
        metavar="NAME",
        help="what leads to the network, such as mlx5_* (default: every network card, which "
        "is a switch with one link)",
    ),
]
MergedOption = Annotated[
    Path, typer.Option("-o", "--output", help="cluster file to write (.toml or .json)")
]


@app.command()
def merge(
    files: FilesArgument,
    network: NetworkOption,
    latency_us: LatencyOption = None,
    prefix: PrefixesOption = None,
    card: CardsOption = None,
    output: MergedOption = DEFAULT_CLUSTER_OUTPUT,
    as_json: JsonOption = False,
) -> None:
    """Join the clusters of several boxes by their network cards, through one switch."""
    with user_errors(as_json):
        from planner.cluster.merge import card_of_device, merged, network_link

        require_cluster_path(output)
        link = network_link(network, latency_us)
        boxes = _boxes(files, prefix or [], card or [])
        made = merged(boxes, link, output.stem)
        made.save(output)
        cards = card_of_device(made, boxes)
        notes = _notes(made, boxes, cards)
        if as_json:
            print_json(
                {
                    "cluster": str(output),
                    "devices": list(made.device_names),
                    "cards": dict(cards),
                    "notes": notes,
                }
            )
            return
        _show(made, cards)
        for note in notes:
            say(f"note: {note}")
        say(f"wrote {output}")
        say(f"next: pipeplan plan MODEL --cluster {shlex.quote(str(output))}")


def _boxes(files: Sequence[Path], prefixes: Sequence[str], cards: Sequence[str]) -> list[MergedBox]:
    """Read the files, and rename what is in them."""
    from planner.cluster.cluster import Cluster
    from planner.cluster.merge import MergedBox, cards_of, renamed

    if len(files) < 2:
        raise PipeplanError(f"FILE: {files[0]} alone cannot be merged; give two files or more")
    if prefixes and len(prefixes) != len(files):
        raise PipeplanError(
            f"--prefix: {plural(len(prefixes), 'prefix', 'es')} for {len(files)} files; give one "
            "for each, in their order, or none"
        )
    boxes = []
    for number, path in enumerate(files):
        one = Cluster.load(path)
        found = cards_of(one, cards, str(path))
        name = prefixes[number].rstrip("/") if prefixes else _default_prefix(one, path)
        if name:
            one, found = renamed(one, name), tuple(f"{name}/{card}" for card in found)
        boxes.append(MergedBox(one, found, str(path)))
    return boxes


def _default_prefix(one: Cluster, path: Path) -> str:
    """Return the file's name, which becomes that of the host; none if devices name their hosts."""
    if all("/" in name for name in one.device_names):
        return ""
    return re.sub(r"[^A-Za-z0-9_.:-]+", "-", path.stem)


def _notes(made: Cluster, boxes: Sequence[MergedBox], cards: Mapping[str, str]) -> list[str]:
    from planner.cluster.merge import detours

    idle = [card for box in boxes for card in box.cards if card not in cards.values()]
    notes = [
        f"{a} and {b} have {outside:.4g} GB/s through the network and {inside:.4g} inside their "
        "box; plans use the wider way, which NCCL does not by default"
        for a, b, inside, outside in detours(made, boxes)
    ]
    if idle:
        notes.append(
            f"no device is nearest to {', '.join(idle)}; a message takes one card, so their "
            "bandwidth stays unused"
        )
    return notes


def _show(made: Cluster, cards: Mapping[str, str]) -> None:
    from planner.plan.operations import compress_devices
    from planner.report.tables import Table

    title = f"{made.name}: {plural(len(made.devices), 'device')}, {plural(len(made.links), 'link')}"
    table = Table(title, ("devices", "reach other boxes by"), ())
    for card in dict.fromkeys(cards.values()):
        devices = [device for device, its in cards.items() if its == card]
        table.add_row(compress_devices(devices), card)
    show(table)
