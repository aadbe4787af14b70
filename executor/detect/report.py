"""The report of a measurement: the cluster file, tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from executor.detect.options import MeasurementOptions
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
from planner.topology.measurements import UNEQUAL, Ends, Measurements
from planner.units import format_seconds, plural

MOST_PAIRS = 32
"""Number of pairs beyond which only the extremes are shown."""
MOST_SPREAD = 10.0
"""The largest spread over the median that is shown as a figure."""
ASYMMETRIC = 0.1
"""Ways that differ by more than this, and more than the tolerance, are told."""
LITTLE_MORE = 1.1
"""Ranks of a host that together do less than so many times one rank's work are told."""
UNEASY = 0.5
"""A spread over the median that is told."""
EXACT = 5e-4
"""Nearer to a bandwidth than a line can tell."""


def conclude(
    options: MeasurementOptions,
    backend: str,
    found: Measurements,
    notes: Sequence[str],
    *,
    is_partial: bool = False,
) -> None:
    """Choose a wiring, write the cluster file, and tell.

    Args:
        options: of the command.
        backend: what carried the messages.
        found: what was measured.
        notes: to be told.
        is_partial: whether something is missing.

    Raises:
        PipeplanError: if the file cannot be written, or nothing can be concluded of any pair.
    """
    if len(found.members) == 1:
        _conclude_alone(options, backend, found)
        return
    if not found.pairs:
        raise PipeplanError(notes)
    choice = choose_topology(found, options.tolerance, options.name)
    latencies = suited_latencies(choice.taken.topology.cluster, found)
    told = [*notes, *_notes(options, found, choice, latencies)]
    _write(options, latencies.cluster, _head(found, choice, backend, is_partial))
    if options.as_json:
        data = _data(options, backend, found, choice, latencies, told)
        print(json.dumps({"is_partial": is_partial, **data}, indent=1), flush=True)
    else:
        for line in _lines(found, choice, latencies, options.tolerance):
            say(line)
        for note in told:
            say(f"note: {note}")
        say(f"wrote {options.output}")
        say(f"next: pipeplan plan MODEL --cluster {shlex.quote(str(options.output))}")


def _conclude_alone(options: MeasurementOptions, backend: str, found: Measurements) -> None:
    """Write and tell what was measured of a single device."""
    head = ["Measured by pipeplan detect: one device, without links."]
    _write(options, cluster_without_links(found, options.name), head)
    if options.as_json:
        data = {"is_partial": False, **_device_data(options, backend, found)}
        print(json.dumps(data, indent=1), flush=True)
    else:
        for line in (*_device_lines(found), f"wrote {options.output}"):
            say(line)


def _write(options: MeasurementOptions, cluster: Cluster, head: Iterable[str]) -> None:
    if options.output.suffix == ".json":
        cluster.save(options.output)
        return
    comments = "".join(f"# {line}\n" for line in head)
    write_atomically(options.output, comments + cluster_toml(cluster))


def _head(
    found: Measurements, choice: TopologyChoice, backend: str, is_partial: bool
) -> Iterator[str]:
    hosts = len({member.host for member in found.members})
    yield (
        f"Measured by pipeplan detect over {backend}: "
        f"{plural(len(found.members), 'rank')} on {plural(hosts, 'host')}."
    )
    yield f"Wiring: {choice.taken.topology.title}."
    yield from _beside_lines(found)
    if is_partial:
        yield f"Interrupted: {plural(len(found.missing), 'pair')} of devices not measured."


def _notes(
    options: MeasurementOptions, found: Measurements, choice: TopologyChoice, latencies: Latencies
) -> Iterator[str]:
    if found.missing:
        cluster = choice.taken.topology.cluster
        apart = [ends for ends in found.missing if cluster.route(*ends) is None]
        alike = [ends for ends in found.missing if ends not in apart]
        if apart:
            yield f"pairs that were not measured, and that no link joins: {_shown(apart)}"
        if alike:
            yield f"pairs that were not measured are taken to be as the others: {_shown(alike)}"
    uneasy = [(row.spread, ends) for ends, row in found.pairs.items() if row.spread > UNEASY]
    if uneasy:
        spread, (a, b) = max(uneasy)
        yield (
            f"messages of {plural(len(uneasy), 'pair')} of devices took uneven times, most {a} - "
            f"{b} (spread {shown_spread(spread)}): something else used the machines or the "
            "network; measure again when nothing does, or with --busy"
        )
    uneven = [
        (row.asymmetry, ends)
        for ends, row in found.pairs.items()
        if row.asymmetry > max(ASYMMETRIC, options.tolerance) + 2 * row.spread
    ]
    if uneven:
        share, (a, b) = max(uneven)
        yield (
            f"{plural(len(uneven), 'pair')} of devices have a faster and a slower way, most "
            f"{a} - {b} by {share:.0%}; a link of the cluster file has one bandwidth, that of the "
            "mean time a byte"
        )
    unequal = [
        (row.latency_ratio, row.latency_s, ends)
        for ends, row in found.pairs.items()
        if row.latency_ratio > UNEQUAL
    ]
    if unequal:
        ratio, lower_s, (a, b) = max(unequal)
        yield (
            f"latencies of the two ways differ between {plural(len(unequal), 'pair')} of devices, "
            f"most {a} - {b} by {ratio:.3g}x; a link of the cluster file has one latency, and the "
            f"lower one counts ({format_seconds(lower_s)} there), as nothing makes a message "
            "faster than its link: measure again when nothing else uses the machines"
        )
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


def _shown(pairs: Sequence[Ends]) -> str:
    rest = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    return ", ".join(f"{a} - {b}" for a, b in pairs[:8]) + rest


# --- tables ---------------------------------------------------------------------------------------


def _lines(
    found: Measurements, choice: TopologyChoice, latencies: Latencies, tolerance: float
) -> Iterator[str]:
    yield from _device_lines(found)
    yield from _pair_lines(found)
    yield ""
    yield from _wiring_lines(found, choice, tolerance)
    if found.together:
        yield ""
        yield from _together_lines(found, choice.taken)
    if found.reductions:
        yield ""
        yield from _reduction_lines(latencies, found)
    yield ""


def _device_lines(found: Measurements) -> Iterator[str]:
    """What was measured of device types, and how ranks of a host slow each other."""
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
    if rows:
        head = ("device type", "GiB", "GB/s", "TFLOP/s", "overhead µs")
        yield from _table(head, rows)
        yield ""
    for host, slowdown in found.slowdowns.items():
        factors = ", ".join(f"{factor:.3g}" for factor in slowdown)
        yield f"{host}: while 1 to {len(slowdown)} ranks compute, they take {factors} times as long"
        if host in found.hosts and found.hosts[host].capacity < LITTLE_MORE:
            yield (
                f"note: more ranks bring nothing on {host}, or something else used it while they "
                "were measured; plans will use one rank there: measure again when nothing does"
            )
    yield from _beside_lines(found)
    if found.slowdowns or found.beside:
        yield ""


def _beside_lines(found: Measurements) -> Iterator[str]:
    return (f"{name}: {row}" for name, row in found.beside.items())


def shown_spread(spread: float) -> str:
    """Return a spread in per cent; that of a fit through noise has no bound."""
    return f"{spread:.0%}" if spread < MOST_SPREAD else f"over {MOST_SPREAD:.0%}"


def _pair_lines(found: Measurements) -> Iterator[str]:
    head = ("from", "to", "latency", "spread", "GB/s", "spread")
    ways = sorted(found.ways.values(), key=lambda way: way.bandwidth_gb_per_s)
    shown = list(found.ways.values())
    if len(shown) > 2 * MOST_PAIRS:
        shown = [*ways[:MOST_PAIRS], *ways[-MOST_PAIRS:]]
        yield f"{len(ways):,} ways between devices; the {MOST_PAIRS} slowest and fastest:"
    rows = [
        (
            way.source,
            way.target,
            format_seconds(way.latency_s),
            shown_spread(way.latency_spread),
            f"{way.bandwidth_gb_per_s:.4g}",
            shown_spread(way.bandwidth_spread),
        )
        for way in shown
    ]
    yield from _table(head, rows)


def _wiring_lines(found: Measurements, choice: TopologyChoice, tolerance: float) -> Iterator[str]:
    taken = choice.taken
    worst = abs(taken.worst.bandwidth)
    yield f"wiring: {taken.topology.title}; " + (
        "each pair's own bandwidth"
        if worst < EXACT
        else f"bandwidths within {worst:.1%} of the pairs' (tolerance {tolerance:.0%} and each "
        "pair's spread)"
    )
    shapes: dict[str, TopologyFit] = {}
    for row in choice.judged:
        best = shapes.setdefault(row.topology.shape, row)
        if row.explains and (not best.explains or _key(row) < _key(best)):
            shapes[row.topology.shape] = row
    for shape, row in shapes.items():
        if shape != taken.topology.shape:
            yield f"not {row.topology.title}: {_against(row, taken)}"


def _key(row: TopologyFit) -> float:
    return 0.0 if row.together is None else row.together


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
    return f"flows at the same time are off by {_off(row.together)}, against {_off(taken.together)}"


def _off(logarithm: float) -> str:
    return f"{logarithm:.0%}" if logarithm < 10 else "no path"


def _together_lines(found: Measurements, taken: TopologyFit) -> Iterator[str]:
    head = ("at the same time", "flow", "GB/s", "by the wiring")
    rows = []
    for row, guesses_s in zip(found.together, taken.predicted_s, strict=True):
        flows = zip(row.flows, row.rates_gb_per_s, row.bytes_, guesses_s, strict=True)
        for number, ((a, b), rate, bytes_, guess_s) in enumerate(flows):
            kind = row.kind if number == 0 else ""
            rows.append((kind, f"{a} > {b}", f"{rate:.4g}", f"{bytes_ / guess_s * 1e-9:.4g}"))
    yield from _table(head, rows[: 2 * MOST_PAIRS])
    if len(rows) > 2 * MOST_PAIRS:
        yield f"and {len(rows) - 2 * MOST_PAIRS} more (--json has all)"


def _reduction_lines(latencies: Latencies, found: Measurements) -> Iterator[str]:
    head = ("all-reduce among", "bytes", "predicted", "measured", "measured / predicted")
    rows = [
        (
            _named(error.reduction.devices),
            f"{error.reduction.bytes_:,}",
            format_seconds(error.predicted_s),
            format_seconds(error.reduction.seconds),
            f"{error.ratio:.2f}",
        )
        for error in reduction_errors(latencies.cluster, found.reductions)
    ]
    yield from _table(head, rows)


def _named(devices: Sequence[str]) -> str:
    first, last = devices[0], devices[-1]
    return (
        f"{len(devices)}: {first}, {last}"
        if len(devices) == 2
        else (f"{len(devices)}: {first} … {last}")
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need; those of figures to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    figures = [all(row[place][:1].isdigit() for row in rows) for place in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if is_figure else cell.ljust(width)
            for cell, width, is_figure in zip(row, widths, figures, strict=True)
        ]
        yield "  ".join(cells).rstrip()


# --- JSON -----------------------------------------------------------------------------------------


def _data(
    options: MeasurementOptions,
    backend: str,
    found: Measurements,
    choice: TopologyChoice,
    latencies: Latencies,
    notes: Sequence[str],
) -> dict[str, Any]:
    taken = choice.taken
    return {
        **_device_data(options, backend, found),
        "tolerance": options.tolerance,
        "ways": [asdict(way) for way in found.ways.values()],
        "missing_pairs": [list(ends) for ends in found.missing],
        "wiring": taken.topology.title,
        "wirings": [_judged_data(row) for row in choice.judged],
        "together": [
            {**asdict(row), "predicted_s": [s if s < math.inf else None for s in guesses_s]}
            for row, guesses_s in zip(found.together, taken.predicted_s, strict=True)
        ],
        "all_reduces": [
            {
                "devices": list(error.reduction.devices),
                "bytes": error.reduction.bytes_,
                "measured_s": error.reduction.seconds,
                "predicted_s": error.predicted_s,
            }
            for error in reduction_errors(latencies.cluster, found.reductions)
        ],
        "latency_factor": latencies.factor,
        "notes": list(notes),
    }


def _device_data(options: MeasurementOptions, backend: str, found: Measurements) -> dict[str, Any]:
    return {
        "cluster": str(options.output),
        "backend": backend,
        "devices": [asdict(member) for member in found.members],
        "device_types": {name: row.model_dump(mode="json") for name, row in found.types.items()},
        "slowdowns": {host: list(factors) for host, factors in found.slowdowns.items()},
        "beside_messages": {name: asdict(row.computation) for name, row in found.beside.items()},
        "beside_computation": {name: asdict(row.messages) for name, row in found.beside.items()},
    }


def _judged_data(row: TopologyFit) -> dict[str, Any]:
    return {
        "title": row.topology.title,
        "explains_pairs": row.explains,
        "worst_bandwidth_error": row.worst.bandwidth,
        "together_error": row.together if row.together is None or row.together < 1e6 else None,
        "half_duplex_links": sum(link.duplex == "half" for link in row.topology.cluster.links),
    }
