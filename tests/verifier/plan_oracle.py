"""What no plan may be, worked out from the plan's data alone: nothing of costs or the verifier.

Memory is a lower bound that needs no times: docs/memory.md's static bytes, the largest workspace
and the stashes in flight, by each device's own order.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import networkx as nx

MOMENTS = {"adamw": 2, "sgd": 0, "sgd_momentum": 1}


def reasons_to_refuse(plan: dict[str, Any]) -> Iterator[str]:
    """Yield why a plan, as it would be in a file, cannot hold; nothing if no reason is seen."""
    graph, stages = plan["model"]["graph"], plan["stages"]
    listed = [name for stage in stages for name in stage["layers"]]
    if sorted(listed) != sorted(layer["name"] for layer in graph["layers"]):
        yield "layers are not each in one stage"
        return
    stage_of = {name: k for k, stage in enumerate(stages) for name in stage["layers"]}
    for tensor in graph["boundaries"]:
        if any(stage_of[user] < stage_of[tensor["producer"]] for user in tensor["users"]):
            yield "an edge goes backwards"
            return
    again = [(k, name) for k, stage in enumerate(stages) for name in stage["recompute"]]
    if any(stage_of.get(name) != k for k, name in again):
        yield "a layer is recomputed elsewhere"
    if again and plan["job"]["recompute"] is False:
        yield "a layer is recomputed against the job"
    broken = [*_broken_orders(plan)]
    yield from broken
    if broken:
        return
    for device, held in least_peaks(plan, stage_of).items():
        kind = next(d["type"] for d in plan["cluster"]["devices"] if d["name"] == device)
        figures = plan["cluster"]["device_types"][kind]
        if held > (figures["memory_gib"] - figures["reserved_gib"]) * 2**30:
            yield f"{device} has too little memory"


def _broken_orders(plan: dict[str, Any]) -> Iterator[str]:
    """Yield why the devices and their orders cannot run every microbatch to its end."""
    stages, known = plan["stages"], {device["name"] for device in plan["cluster"]["devices"]}
    orders = {device: _operations(order) for device, order in plan["orders"].items()}
    for stage in stages:
        if not 0 < len(stage["devices"]) == len(set(stage["devices"]) & known):
            yield "a stage has no device, one twice, or one that there is not"
    held = Counter(device for stage in stages for device in stage["devices"])
    if max(held.values(), default=0) > plan["job"]["max_stages_per_device"]:
        yield "a device holds more stages than the job allows"
    ran = {key: [] for key in product(range(len(stages)), range(plan["job"]["microbatches"]))}
    for device, order in orders.items():
        for stage, kind, microbatch in order:
            if (stage, microbatch) not in ran or device not in stages[stage]["devices"]:
                yield "an operation is where it does not belong"
                return
            ran[stage, microbatch].append((device, kind))
    for rows in ran.values():
        if len({device for device, _ in rows}) != 1:
            yield "a microbatch is on no device or on several of a stage"
        if "".join(kind for _, kind in rows) not in ("FB", "FIW"):
            yield "a microbatch has not each operation once, in this order"
    if not nx.is_directed_acyclic_graph(nx.DiGraph([*_waits(orders, len(stages) - 1)])):
        yield "operations wait for each other"


def _operations(order: str) -> list[tuple[int, str, int]]:
    found = [re.fullmatch(r"(\d+)([FBIW])(\d+)", word) for word in order.split()]
    return [(int(word[1]), word[2], int(word[3])) for word in found if word]


def _waits(
    orders: dict[str, list[tuple[int, str, int]]], last: int
) -> Iterator[tuple[tuple[int, str, int], tuple[int, str, int]]]:
    """Yield pairs of operations of which the second waits for the first; backwards count as B."""
    alike = {"F": "F", "B": "B", "I": "B", "W": "W"}
    for order in orders.values():
        yield from pairwise((stage, alike[kind], number) for stage, kind, number in order)
        for stage, kind, number in order:
            if kind == "F" and stage < last:
                yield (stage, "F", number), (stage + 1, "F", number)
            if kind == "F" and stage == last:
                yield (stage, "F", number), (stage, "B", number)
            if kind in "BI" and stage:
                yield (stage, "B", number), (stage - 1, "B", number)


def _takes_time(plan: dict[str, Any]) -> bool:
    """Return whether every operation does, by its FLOPs."""
    kinds = ("forward_flops", "input_gradient_flops", "weight_gradient_flops")
    return all(
        any(row[kind] > 0 for row in _rows(plan, stage))
        for stage in range(len(plan["stages"]))
        for kind in kinds
    )


def least_peaks(plan: dict[str, Any], stage_of: dict[str, int]) -> dict[str, int]:
    """Return for each device the most that it holds at least, whatever the times.

    Empty where an operation may take no time: what is held for none counts nowhere.
    """
    peaks: dict[str, int] = {}
    if not _takes_time(plan):
        return peaks
    for device, order in plan["orders"].items():
        there = [k for k, stage in enumerate(plan["stages"]) if device in stage["devices"]]
        held, most = 0, 0
        for word in order.split():
            kind = next(letter for letter in word if letter.isalpha())
            stage = int(word.split(kind)[0])
            stash, late = _stash(plan, stage_of, stage)
            held += stash if kind == "F" else 0
            most = max(most, held)  # As a forward ends, or a backward begins.
            held += {"F": 0, "B": -stash, "I": late - stash, "W": -late}[kind]
        layers = [set(plan["stages"][k]["layers"]) for k in there]
        static = sum(_static(plan, names) for names in layers)
        peaks[device] = static + max((_workspace(plan, k) for k in there), default=0) + most
    return peaks


def _rows(plan: dict[str, Any], stage: int) -> list[dict[str, Any]]:
    """The layers of a stage in the order of the graph."""
    names = plan["stages"][stage]["layers"]
    return [layer for layer in plan["model"]["graph"]["layers"] if layer["name"] in names]


def _gradient(job: dict[str, Any], row: dict[str, Any]) -> int:
    is_low = job["precision"] in ("bfloat16", "float16")
    widens = is_low and job.get("gradient_precision") != "weights"
    return 4 * row["elements"] if widens else row["bytes"]


def _static(plan: dict[str, Any], layers: set[str]) -> int:
    job, graph = plan["job"], plan["model"]["graph"]
    used = {p for row in graph["layers"] if row["name"] in layers for p in row["parameters"]}
    copies = MOMENTS[job["optimizer"]] + (job["precision"] in ("bfloat16", "float16"))
    each = copies * (8 if job["precision"] == "float64" else 4)
    total = 0
    for row in graph["parameters"]:
        if row["name"] in used:
            total += row["bytes"]
            total += _gradient(job, row) + each * row["elements"] if row["trainable"] else 0
    return total


def _stash(plan: dict[str, Any], stage_of: dict[str, int], stage: int) -> tuple[int, int]:
    """Bytes from forward until backward, and those a weight gradient still needs."""
    again = {name for row in plan["stages"] for name in row["recompute"]}
    rows = _rows(plan, stage)
    stash = sum(row["stash_bytes"] for row in rows if row["name"] not in again)
    late = sum(row.get("weight_stash_bytes", row["stash_bytes"]) for row in rows)
    for tensor in plan["model"]["graph"]["boundaries"]:
        made, saver = stage_of[tensor["producer"]], tensor["saved_by"]
        in_stash = saver is not None and saver not in again and stage_of[saver] == stage
        if made < stage and any(stage_of[user] >= stage for user in tensor["users"]):
            stash += 0 if in_stash else tensor["bytes"]
            late += 0 if in_stash else tensor["bytes"]
        users = {user for user in tensor["users"] if user in again and stage_of[user] == stage}
        if made == stage and users and not in_stash:
            stash += tensor["bytes"]
    return stash, late


def _workspace(plan: dict[str, Any], stage: int) -> int:
    graph, again = plan["model"]["graph"], set(plan["stages"][stage]["recompute"])
    trained = {p["name"]: p["bytes"] for p in graph["parameters"] if p["trainable"]}
    peaks, kept = [], []
    for row in _rows(plan, stage):
        name = row["name"]
        used = [tensor for tensor in graph["boundaries"] if name in tensor["users"]]
        peak = row["stash_bytes"] + max((trained.get(p, 0) for p in row["parameters"]), default=0)
        peak += sum(2 * t["bytes"] for t in graph["boundaries"] if t["producer"] == name)
        peak += sum(t["bytes"] for t in used if t["requires_grad"])
        peaks.append(row.get("peak_bytes", peak))
        saved = sum(t["bytes"] for t in used if t["saved_by"] == name)
        kept.append(saved if name in again else row["stash_bytes"])
    return max(0, *(peak - sum(kept[k:]) for k, peak in enumerate(peaks)))
