"""Single changes of a plan: how they are written, and the stages that they make.

One line each, the same in and out, such as ``begin stage 3 at h.12``;
:data:`FORMS` has all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import has_equal_groups
from planner.errors import PipeplanError, near, shorten
from planner.plan.operations import Orders
from planner.plan.problem import Problem

Kind = Literal[
    "boundary",
    "exchange",
    "add",
    "remove",
    "move",
    "merge",
    "split",
    "split onto",
    "reschedule",
]
FORMS: Mapping[Kind, str] = {
    "boundary": "begin stage {target} at {first}",
    "exchange": "exchange devices {one} and {other}",
    "add": "add replica {device} to stage {target}",
    "remove": "remove replica {device} from stage {source}",
    "move": "move replica {device} from stage {source} to stage {target}",
    "merge": "merge stages {source} and {target}",
    "split onto": "split stage {source} before {first} onto {device}",
    "split": "split stage {source} before {first}",
    "reschedule": "reschedule all stages",
}
"""Every form of a change; where two fit, the first one counts."""
_NUMBERS = {"source", "target"}
KEEPS_ORDERS = frozenset({"boundary", "exchange"})
"""Changes under which every device, or the one it is exchanged for, may keep its order."""
Stages = tuple[StageSpec, ...]


@dataclass(frozen=True)
class Move:
    """A single change of a plan.

    Attributes:
        kind: which of the :data:`FORMS`.
        words: what stands in the form, by name.
    """

    kind: Kind
    words: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return FORMS[self.kind].format(**dict(self.words))

    def __getitem__(self, name: str) -> str:
        return dict(self.words)[name]


def move(kind: Kind, **words: object) -> Move:
    """Return a change by its kind and the words of its form."""
    return Move(kind, tuple((name, str(word)) for name, word in words.items()))


def parse_move(text: str) -> Move:
    """Read a change as people write it. Names are not looked up yet.

    Raises:
        PipeplanError: that names the forms there are.
    """
    words = " ".join(text.split())
    for kind, form in FORMS.items():
        found = re.fullmatch(_pattern(form), words)
        if found is not None:
            return move(kind, **found.groupdict())
    forms = "; ".join(re.sub(r"\{(\w+)\}", lambda f: f[1].upper(), form) for form in FORMS.values())
    raise PipeplanError(
        f"change {shorten(text)}: is of no known form; write one of these, with names and numbers "
        f"in place of FIRST, SOURCE, TARGET, …: {forms}"
    )


def _pattern(form: str) -> str:
    def group(found: re.Match[str]) -> str:
        return rf"(?P<{found[1]}>{r'[0-9]{1,6}' if found[1] in _NUMBERS else '.+?'})"

    return re.sub(r"\{(\w+)\}", group, form)


def changed(problem: Problem, stages: Stages, change: Move) -> Stages:
    """Return the stages under a change.

    Raises:
        PipeplanError: naming the change, and what it names that there is not or cannot be.
    """
    try:
        found = _APPLY[change.kind](problem, stages, change)
        _require_possible(problem, found)
    except PipeplanError as error:
        raise PipeplanError(f"change '{change}': {row}" for row in error.problems) from None
    return found


def changed_orders(orders: Orders, change: Move) -> Orders:
    """Return the orders of devices after a change that keeps them, see :data:`KEEPS_ORDERS`."""
    if change.kind != "exchange":
        return orders
    image = {change["one"]: change["other"], change["other"]: change["one"]}
    return {image.get(device, device): order for device, order in orders.items()}


# --- layers and stages ----------------------------------------------------------------------------


def _stage(stages: Stages, change: Move, name: str) -> int:
    number = int(change[name])
    if number >= len(stages):
        raise PipeplanError(f"there is no stage {number}; the last is {len(stages) - 1}")
    return number


def _with_boundary(problem: Problem, stages: Stages, change: Move) -> Stages:
    number, first = _stage(stages, change, "target"), change["first"]
    if number == 0:
        raise PipeplanError("stage 0 begins with the model; name a later stage")
    before, after = stages[number - 1], stages[number]
    layers = problem.graph.in_order([*before.layers, *after.layers])
    if first not in layers[1:]:
        raise PipeplanError(
            f"{first!r} is no layer of stages {number - 1} and {number} behind their first; "
            f"{near(first, layers[1:])}"
        )
    cut = layers.index(first)
    if tuple(layers[cut:]) == after.layers:
        raise PipeplanError(f"stage {number} begins there already; name another layer")
    again, away = {*before.recompute, *after.recompute}, {*before.offload, *after.offload}
    parts = {
        number - 1: _spec(before, layers[:cut], again, away),
        number: _spec(after, layers[cut:], again, away),
    }
    return _replaced(stages, parts)


def _spec(stage: StageSpec, layers: Sequence[str], again: set[str], away: set[str]) -> StageSpec:
    return replace(
        stage,
        layers=tuple(layers),
        recompute=tuple(name for name in layers if name in again),
        offload=tuple(name for name in layers if name in away),
    )


def _replaced(stages: Stages, fresh: Mapping[int, StageSpec]) -> Stages:
    return tuple(fresh.get(number, stage) for number, stage in enumerate(stages))


def _merged(problem: Problem, stages: Stages, change: Move) -> Stages:
    first, second = sorted(_stage(stages, change, name) for name in ("source", "target"))
    if second - first != 1:
        raise PipeplanError(f"stages {first} and {second} are not next to each other")
    one, other = stages[first], stages[second]
    devices = _sorted(problem, {*one.devices, *other.devices})
    layers = problem.graph.in_order([*one.layers, *other.layers])
    again, away = {*one.recompute, *other.recompute}, {*one.offload, *other.offload}
    joined = replace(_spec(one, layers, again, away), devices=devices)
    return (*stages[:first], joined, *stages[second + 1 :])


def _split(problem: Problem, stages: Stages, change: Move) -> Stages:
    number = _stage(stages, change, "source")
    stage, first = stages[number], change["first"]
    layers = problem.graph.in_order(stage.layers)
    if first not in layers[1:]:
        raise PipeplanError(
            f"{first!r} is no layer of stage {number} behind its first; {near(first, layers[1:])}"
        )
    half = (len(stage.devices) + 1) // 2
    before, after = stage.devices[:half], stage.devices[half:]
    if change.kind == "split onto":
        device = change["device"]
        _require_device(problem, device)
        before, after = tuple(name for name in stage.devices if name != device), (device,)
    if not before or not after:
        raise PipeplanError(
            f"stage {number} has one device; name another for the second part: "
            f"'{FORMS['split onto'].format(source=number, first=first, device='DEVICE')}'"
        )
    cut = layers.index(first)
    again, away = {*stage.recompute}, {*stage.offload}
    parts = (
        replace(_spec(stage, layers[:cut], again, away), devices=before),
        replace(_spec(stage, layers[cut:], again, away), devices=after),
    )
    return (*stages[:number], *parts, *stages[number + 1 :])


# --- devices --------------------------------------------------------------------------------------


def _sorted(problem: Problem, devices: set[str]) -> tuple[str, ...]:
    return tuple(sorted(devices, key=problem.cluster.numbers.__getitem__))


def _require_device(problem: Problem, device: str) -> None:
    names = problem.cluster.device_names
    if device not in problem.cluster.numbers:
        raise PipeplanError(f"the cluster has no device {device!r}; {near(device, names)}")


def _exchanged(problem: Problem, stages: Stages, change: Move) -> Stages:
    image = {change["one"]: change["other"], change["other"]: change["one"]}
    for device in image:
        _require_device(problem, device)
    if len(image) == 1:
        raise PipeplanError("it is one device; name two")
    if not {device for stage in stages for device in stage.devices} & set(image):
        raise PipeplanError("neither holds a stage; name one that does")
    return tuple(
        replace(stage, devices=tuple(image.get(d, d) for d in stage.devices)) for stage in stages
    )


def _with_replica(problem: Problem, stages: Stages, change: Move) -> Stages:
    device, fresh, words = change["device"], {}, dict(change.words)
    _require_device(problem, device)
    if words.get("source") == words.get("target"):
        raise PipeplanError(f"it stays in stage {words['source']}; name another stage")
    if "source" in words:
        source = _stage(stages, change, "source")
        rest = tuple(name for name in stages[source].devices if name != device)
        if rest == stages[source].devices:
            raise PipeplanError(f"it does not hold stage {source}")
        if not rest:
            raise PipeplanError(f"stage {source} has no other device; exchange it instead")
        fresh[source] = replace(stages[source], devices=rest)
    if "target" in words:
        target = _stage(stages, change, "target")
        if device in stages[target].devices:
            raise PipeplanError(f"it holds stage {target} already")
        joined = _sorted(problem, {*stages[target].devices, device})
        fresh[target] = replace(stages[target], devices=joined)
    return _replaced(stages, fresh)


def _require_possible(problem: Problem, stages: Stages) -> None:
    """Refuse layers on types that cannot run them, and groups of unlike sizes in one stage."""
    layers, type_of = problem.graph.layers, problem.cluster.type_of
    for stage in stages:
        for layer, device in product(map(layers.__getitem__, stage.layers), stage.devices):
            if not layer.may_run_on(type_of(device)):
                raise PipeplanError(
                    f"layer {layer.name!r} would be on {device!r}, but runs on device types "
                    f"{', '.join(layer.device_types)} only"
                )
    if not has_equal_groups(problem, stages):
        raise PipeplanError(
            "tensor-parallel groups of several sizes would hold one stage, or stages that share a "
            "parameter"
        )


_APPLY: Mapping[str, Callable[[Problem, Stages, Move], Stages]] = {
    **dict.fromkeys(("add", "remove", "move"), _with_replica),
    **dict.fromkeys(("split", "split onto"), _split),
    "boundary": _with_boundary,
    "merge": _merged,
    "exchange": _exchanged,
    "reschedule": lambda problem, stages, change: stages,
}
