"""The report of a measurement: the cluster file, tables for people, JSON for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from executor.detect.options import TOLERANCE, MeasurementOptions
from executor.launch.console import say
from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import cluster_toml
from planner.errors import PipeplanError
from planner.records.document import write_atomically
from planner.topology.candidates import cluster_without_links
from planner.topology.choice import (
    Latencies,
    TopologyChoice,
    TopologyFit,
    choose_topology,
    reduction_errors,
    suited_latencies,
)
from planner.topology.measurements import UNEQUAL, BothWays, Ends, Measurements
from planner.units import format_seconds, plural

MOST_ROWS = 64
"""Rows of a table that are shown; --json has all."""
MOST_SPREAD = 10.0
"""The largest spread over the median that is shown as a figure."""
ASYMMETRIC = 0.1
"""Directions of a pair that differ by a larger share are noted."""
LITTLE_MORE = 1.1
"""Ranks of a host that together do less than so many times one rank's work are noted."""
UNEASY = 0.5
"""A spread over the median that is noted."""
EXACT = 5e-4
"""Nearer to a bandwidth than a line can show."""


def conclude(
    options: MeasurementOptions,
    backend: str,
    found: Measurements,
    notes: Sequence[str],
    *,
    is_partial: bool = False,
) -> None:
    """Choose a topology, write the cluster file, and print the figures.

    Args:
        options: of the command.
        backend: what carried the messages.
        found: what was measured.
        notes: to be printed.
        is_partial: whether something is missing.

    Raises:
        PipeplanError: if the file cannot be written, or nothing can be concluded of any pair.
    """
    data = {"is_partial": is_partial, **_device_data(options, backend, found)}
    if len(found.members) == 1:
        head = ["Measured by pipeplan detect: one device, without links."]
        _write(options, cluster_without_links(found, options.name), head)
        _print(options, data, _device_lines(found))
        return
    if not found.pairs:
        raise PipeplanError(notes)
    choice = choose_topology(found, TOLERANCE, options.name)
    latencies = suited_latencies(choice.taken.topology.cluster, found)
    notes = [*notes, *_notes(options, found, choice, latencies)]
    _write(options, latencies.cluster, _head(found, choice, backend, is_partial))
    data |= {**_link_data(found, choice, latencies), "notes": notes}
    plan = f"next: pipeplan plan MODEL --cluster {shlex.quote(str(options.output))}"
    _print(options, data, [*_lines(found, choice, latencies), *(f"note: {n}" for n in notes)], plan)


def _print(options: MeasurementOptions, data: Any, lines: Sequence[str], after: str = "") -> None:
    if options.as_json:
        print(json.dumps(data, indent=1), flush=True)
        return
    for line in (*lines, f"wrote {options.output}", *filter(None, [after])):
        say(line)


def _write(options: MeasurementOptions, cluster: Cluster, head: Sequence[str]) -> None:
    if options.output.suffix == ".json":
        cluster.save(options.output)
        return
    comments = "".join(f"# {line}\n" for line in head)
    write_atomically(options.output, comments + cluster_toml(cluster))


def _head(found: Measurements, choice: TopologyChoice, backend: str, is_partial: bool) -> list[str]:
    ranks = plural(len(found.members), "rank")
    hosts = plural(len({member.host for member in found.members}), "host")
    missing = f"Interrupted: {plural(len(found.missing), 'pair')} of devices not measured."
    return [
        f"Measured by pipeplan detect over {backend}: {ranks} on {hosts}.",
        f"Wiring: {choice.taken.topology.title}.",
        *_beside_lines(found),
        *[missing] * is_partial,
    ]


# --- notes ----------------------------------------------------------------------------------------


def _notes(
    options: MeasurementOptions, found: Measurements, choice: TopologyChoice, latencies: Latencies
) -> Iterator[str]:
    cluster = choice.taken.topology.cluster
    apart = [ends for ends in found.missing if cluster.route(*ends) is None]
    alike = [ends for ends in found.missing if ends not in apart]
    if apart:
        yield f"pairs that were not measured, and that no link joins: {_shown(apart)}"
    if alike:
        yield f"pairs that were not measured are taken to be as the others: {_shown(alike)}"
    yield from _pair_notes(found)
    if not options.together:
        yield "flows at the same time were not measured: what pairs share is only assumed"
    if latencies.factor != 1:
        before, after = latencies.reduction_error_before, latencies.reduction_error
        yield (
            f"latency_us is {latencies.factor:.3g} times that of single messages, which predicts "
            f"all-reduces better (off by a factor of {after:.3g} instead of {before:.3g} on "
            f"average) and single messages by {latencies.message_error:.3g} instead of "
            f"{latencies.message_error_before:.3g}"
        )


def _pair_notes(found: Measurements) -> Iterator[str]:
    """Note the number of pairs with uneven times or unequal directions, and the worst of them."""

    def worst(figure: Callable[[BothWays], float], most: Callable[[BothWays], float]) -> Any:
        rows = [(figure(row), ends) for ends, row in found.pairs.items() if figure(row) > most(row)]
        return (plural(len(rows), "pair"), *max(rows)) if rows else None

    if row := worst(lambda pair: pair.spread, lambda _: UNEASY):
        pairs, spread, (a, b) = row
        yield (
            f"messages of {pairs} of devices took uneven times, most {a} - {b} (spread "
            f"{shown_spread(spread)}): something else used the machines or the network; measure "
            "again when nothing does, or with --busy"
        )
    if row := worst(lambda pair: pair.asymmetry, lambda pair: ASYMMETRIC + 2 * pair.spread):
        pairs, share, (a, b) = row
        yield (
            f"{pairs} of devices have a faster and a slower way, most {a} - {b} by {share:.0%}; a "
            "link of the cluster file has one bandwidth, that of the mean time a byte"
        )
    if row := worst(lambda pair: pair.latency_ratio, lambda _: UNEQUAL):
        pairs, ratio, (a, b) = row
        lower = format_seconds(found.pairs[a, b].latency_s)
        yield (
            f"latencies of the two ways differ between {pairs} of devices, most {a} - {b} by "
            f"{ratio:.3g}x; a link of the cluster file has one latency, and the lower one counts "
            f"({lower} there), as nothing makes a message faster than its link: measure again when "
            "nothing else uses the machines"
        )


def _shown(pairs: Sequence[Ends]) -> str:
    rest = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    return ", ".join(f"{a} - {b}" for a, b in pairs[:8]) + rest


# --- tables ---------------------------------------------------------------------------------------


def _lines(found: Measurements, choice: TopologyChoice, latencies: Latencies) -> list[str]:
    parts = [
        _device_lines(found),
        _pair_table(found),
        [*_wiring_lines(choice)],
        _together_table(found, choice.taken),
        _reduction_table(latencies, found),
    ]
    return [line for part in parts if part for line in (*part, "")]


def _device_lines(found: Measurements) -> list[str]:
    """Return what was measured of device types, and how ranks of a host slow each other."""
    rows = [
        (
            name,
            f"{kind.memory_gib:.4g}",
            f"{kind.memory_bandwidth_gb_per_s:.4g}",
            ", ".join(f"{key} {value:.3g}" for key, value in kind.peak_tflop_per_s.items()),
            f"{kind.operation_overhead_us:.3g}",
        )
        for name, kind in found.types.items()
        if kind.source == "measured"
    ]
    lines = _table(("device type", "GiB", "GB/s", "TFLOP/s", "overhead µs"), rows)
    for host, slowdown in found.slowdowns.items():
        factors = ", ".join(f"{factor:.3g}" for factor in slowdown)
        lines.append(
            f"{host}: while 1 to {len(slowdown)} ranks compute, they take {factors} times as long"
        )
        if host in found.hosts and found.hosts[host].capacity < LITTLE_MORE:
            lines.append(
                f"note: more ranks bring nothing on {host}, or something else used it while they "
                "were measured; plans will use one rank there: measure again when nothing does"
            )
    return lines + _beside_lines(found)


def _beside_lines(found: Measurements) -> list[str]:
    return [f"{name}: {row}" for name, row in found.beside.items()]


def shown_spread(spread: float) -> str:
    """Return a spread in per cent; that of a fit through noise has no bound."""
    return f"{spread:.0%}" if spread < MOST_SPREAD else f"over {MOST_SPREAD:.0%}"


def _pair_table(found: Measurements) -> list[str]:
    rows = [
        (
            way.source,
            way.target,
            format_seconds(way.latency_s),
            shown_spread(way.latency_spread),
            f"{way.bandwidth_gb_per_s:.4g}",
            shown_spread(way.bandwidth_spread),
        )
        for way in sorted(found.ways.values(), key=lambda way: way.bandwidth_gb_per_s)
    ]
    return _table(("from", "to", "latency", "spread", "GB/s", "spread"), rows)


def _wiring_lines(choice: TopologyChoice) -> Iterator[str]:
    taken, worst = choice.taken, abs(choice.taken.worst.bandwidth)
    yield f"wiring: {taken.topology.title}; " + (
        "each pair's own bandwidth"
        if worst < EXACT
        else f"bandwidths within {worst:.1%} of the pairs' (tolerance {TOLERANCE:.0%} and each "
        "pair's spread)"
    )

    def order(row: TopologyFit) -> tuple[bool, float]:
        return not row.explains, row.together or 0.0

    shapes: dict[str, TopologyFit] = {}
    for row in sorted(choice.judged, key=order):
        shapes.setdefault(row.topology.shape, row)
    for shape, row in shapes.items():
        if shape != taken.topology.shape:
            yield f"not {row.topology.title}: {_against(row, taken)}"


def _against(row: TopologyFit, taken: TopologyFit) -> str:
    if not row.explains:
        wrong = [error for error in row.errors if not error.is_within]
        far = max(wrong, key=lambda error: (abs(error.bandwidth), abs(error.latency)))
        return (
            f"{plural(len(wrong), 'pair')} of {len(row.errors)} not explained, most "
            f"{far.ends[0]} - {far.ends[1]} (bandwidth {far.bandwidth:+.0%}, latency "
            f"{far.latency:+.0%})"
        )
    if row.together is None or taken.together is None:
        return "less simple"
    off, taken_off = (f"{x:.0%}" if x < 10 else "no path" for x in (row.together, taken.together))
    return f"flows at the same time are off by {off}, against {taken_off}"


def _together_table(found: Measurements, taken: TopologyFit) -> list[str]:
    rows = []
    for row, guesses_s in zip(found.together, taken.predicted_s, strict=True):
        flows = zip(row.flows, row.rates_gb_per_s, row.bytes_, guesses_s, strict=True)
        for number, ((a, b), rate, bytes_, guess_s) in enumerate(flows):
            kind = row.kind if number == 0 else ""
            rows.append((kind, f"{a} > {b}", f"{rate:.4g}", f"{bytes_ / guess_s * 1e-9:.4g}"))
    return _table(("at the same time", "flow", "GB/s", "by the wiring"), rows)


def _reduction_table(latencies: Latencies, found: Measurements) -> list[str]:
    rows = [
        (
            f"{len(devices)}: {devices[0]}{', ' if len(devices) == 2 else ' … '}{devices[-1]}",
            f"{error.reduction.bytes_:,}",
            format_seconds(error.predicted_s),
            format_seconds(error.reduction.seconds),
            f"{error.ratio:.2f}",
        )
        for error in reduction_errors(latencies.cluster, found.reductions)
        for devices in [error.reduction.devices]
    ]
    head = ("all-reduce among", "bytes", "predicted", "measured", "measured / predicted")
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return columns as wide as they need, those of figures to the right; nothing without rows."""
    if not rows:
        return []
    left = [f"and {len(rows) - MOST_ROWS} more (--json has all)"] * (len(rows) > MOST_ROWS)
    rows = rows[:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    figures = [all(row[place][:1].isdigit() for row in rows) for place in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if is_figure else cell.ljust(width)
            for cell, width, is_figure in zip(row, widths, figures, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return [*lines, *left]


# --- JSON -----------------------------------------------------------------------------------------


def _device_data(options: MeasurementOptions, backend: str, found: Measurements) -> dict[str, Any]:
    return {
        "cluster": str(options.output),
        "backend": backend,
        "devices": [asdict(member) for member in found.members],
        "device_types": {name: row.model_dump(mode="json") for name, row in found.types.items()},
        "slowdowns": {host: list(factors) for host, factors in found.slowdowns.items()},
        "beside": {name: asdict(row) for name, row in found.beside.items()},
    }


def _link_data(found: Measurements, choice: TopologyChoice, latencies: Latencies) -> dict[str, Any]:
    taken = choice.taken
    return {
        "ways": [asdict(way) for way in found.ways.values()],
        "missing_pairs": [list(ends) for ends in found.missing],
        "wiring": taken.topology.title,
        "wirings": [
            {
                "title": row.topology.title,
                "explains_pairs": row.explains,
                "worst_bandwidth_error": row.worst.bandwidth,
                "together_error": _finite(row.together),
            }
            for row in choice.judged
        ],
        "together": [
            {**asdict(row), "predicted_s": [_finite(guess_s) for guess_s in guesses_s]}
            for row, guesses_s in zip(found.together, taken.predicted_s, strict=True)
        ],
        "all_reduces": [
            {**asdict(error.reduction), "predicted_s": error.predicted_s}
            for error in reduction_errors(latencies.cluster, found.reductions)
        ],
        "latency_factor": latencies.factor,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no word for no path, whose error or time is infinite or next to it."""
    return value if value is not None and value < 1e6 else None
