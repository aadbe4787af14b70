"""Synchronisation strategies and their options, as written in plans, files and commands.

A strategy is written ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, model_validator

from planner.errors import PipeplanError, shorten
from planner.job import JsonValue
from planner.plan.plan import BUCKET_MIB, FUSION_MIB, Sync
from planner.records.document import Record
from planner.sync.papers import PAPERS
from planner.units import plural

Mib = Annotated[float, Field(gt=0, le=2**20)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
GroupSize = Annotated[int, Field(ge=2, le=4096)]


class AllReduceOptions(Record):
    """``all_reduce``: gradients are summed in buckets, overlapped with the backward.

    Attributes:
        bucket_mib: size of a bucket of gradients.
        overlap: whether a bucket starts when its gradients are ready; otherwise after the whole
            backward.
    """

    bucket_mib: Mib = BUCKET_MIB
    overlap: bool = True


class FusedOptions(Record):
    """``fused``: as ``all_reduce``, but small tensors are collected until there are enough.

    Attributes:
        fusion_mib: size of a bucket, over all stages of a rank.
    """

    fusion_mib: Mib = FUSION_MIB


class DecoupledOptions(Record):
    """``decoupled``: reduce-scatter overlapped with the backward, all-gather with the next forward.

    DeAR (Zhang et al. 2023, "Decoupling the All-Reduce Primitive").

    Attributes:
        bucket_mib: size of a bucket of gradients.
    """

    bucket_mib: Mib = 25.0


class CrossIterationOptions(Record):
    """``cross_iteration``: an iteration begins with an approximation of its parameters.

    Jin's thesis (HKU 2023): the all-reduce of iteration t is overlapped with iteration t + 1.

    Attributes:
        approximation: used by iteration t + 1 instead of the aggregate that has not arrived: the
            rank's ``own_gradient``, or the ``last_update``.
        fusion_mib: size of a bucket.
    """

    approximation: Literal["own_gradient", "last_update"] = "own_gradient"
    fusion_mib: Mib = 64.0


class ParameterServerOptions(Record):
    """``parameter_server``: a server holds the parameters and the optimizer's state.

    Attributes:
        mode: ``sync`` applies the mean of all gradients; ``async`` applies each as it arrives.
        servers: number of pipelines that share the parameters as servers; None: one.
    """

    mode: Literal["sync", "async"] = "sync"
    servers: Annotated[int, Field(ge=1, le=4096)] | None = None


class EagerParameterServerOptions(Record):
    """``eager_parameter_server``: push and pull separately, both overlapped with computation.

    PS+ of Jin's thesis (HKU 2023).

    Attributes:
        modulation: factor on a gradient of staleness tau: 1 / (1 + tau), exp(-decay tau), or 1.
        decay: decay of the exponential modulation; refused together with any other.
        servers: number of pipelines that share the parameters as servers; None: one.
    """

    modulation: Literal["inverse", "exponential", "constant"] = "inverse"
    decay: Annotated[float, Field(gt=0, le=100)] = 0.5
    servers: Annotated[int, Field(ge=1, le=4096)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> EagerParameterServerOptions:
        if "decay" in self.model_fields_set and self.modulation != "exponential":
            raise ValueError(
                f"decay with modulation = '{self.modulation}', which has none; remove it, or "
                "use modulation = 'exponential'"
            )
        return self

    def factor(self, newer: int, pipelines: int) -> float:
        """Return the factor on the learning rate of a gradient.

        With tau the staleness, ``inverse`` is 1 / (1 + tau), ``exponential`` is
        exp(-decay * tau), and ``constant`` is 1.

        Args:
            newer: updates between the version that the gradient was computed on and the newest one
                that its pipeline knows of as it pushes.
            pipelines: updates that count as a staleness of 1.
        """
        staleness = newer / pipelines
        match self.modulation:
            case "inverse":
                return 1 / (1 + staleness)
            case "exponential":
                return math.exp(-self.decay * staleness)
        return 1.0


class WaveSynchronousOptions(Record):
    """``wave_synchronous``: a server adds up what each pipeline's waves change; waves stay near.

    HetPipe (Park et al., ATC 2020): a pipeline is a virtual worker, and a wave the microbatches of
    one of its work units.

    Attributes:
        distance: waves that a pipeline may be ahead of the slowest one; 0 makes all wait for each
            other. The paper's D.
        servers: number of pipelines that share the parameters as servers; None: one.
    """

    distance: Annotated[int, Field(ge=0, le=10**6)] = 4
    servers: Annotated[int, Field(ge=1, le=4096)] | None = None


class AdPsgdOptions(Record):
    """``ad_psgd``: pairs of pipelines average their weights (Lian et al. 2018).

    Attributes:
        pairs: ``bipartite``: half of the pipelines ask, the other half answers at any time;
            ``matching``: pairs are disjoint, and a pipeline waits for its partner.
    """

    pairs: Literal["bipartite", "matching"] = "bipartite"


class PartialAllReduceOptions(Record):
    """``partial_all_reduce``: groups of pipelines average their weights.

    Ripples (Luo et al. 2019; Prague, ASPLOS 2020).

    Attributes:
        schedule: ``static``: a fixed schedule of groups; ``generator``: groups are drawn.
        group_size: size of drawn groups; above the number of pipelines it means all. None: 3, or
            half of the pipelines if that is fewer, at least 2.
        pipelines_per_node: pipelines that share a node, for the static schedule and
            ``inter_intra``; it divides the number of pipelines. None: from the cluster. If the
            cluster has only one node or one pipeline per node, nodes of 4 are assumed, or of 2 with
            fewer than 8 pipelines.
        group_buffer: any pipeline is drawn, and groups drawn for it by others come first; otherwise
            only pipelines without a group are drawn. A division never draws a pipeline with a
            group.
        group_division: draw disjoint groups of all pipelines without one at once.
        inter_intra: draw one group across nodes and one of each node's rest, then whole nodes.
        slowdown_filter: a pipeline that draws a group leaves out those this many iterations or more
            behind; None: no filter.
        filter_between: pipelines that the filter keeps apart in a division: ``all`` that are drawn
            together; or the ``initiator`` and those it draws, as in Ripples.
        overlap: overlap the average with the next iteration, whose gradient is then computed with
            weights from before the average. A group still begins when its slowest member is there;
            who has computed an iteration meanwhile waits for it then. Ripples itself waits at once.
        seed: seed of the draws.
    """

    schedule: Literal["static", "generator"] = "generator"
    group_size: GroupSize | None = None
    pipelines_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    group_buffer: bool = True
    group_division: bool = True
    inter_intra: bool = False
    slowdown_filter: Annotated[int, Field(ge=1, le=10**6)] | None = 4
    filter_between: Literal["all", "initiator"] = "all"
    overlap: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _fits_together(self) -> PartialAllReduceOptions:
        extra = sorted(self.model_fields_set - {"schedule", "pipelines_per_node", "overlap"})
        if self.schedule == "static" and extra:
            raise ValueError(
                f"{', '.join(extra)} with schedule = 'static', which draws no groups; remove "
                f"{'it' if len(extra) == 1 else 'them'}, or use schedule = 'generator'"
            )
        if self.schedule == "generator" and not self.inter_intra and self.pipelines_per_node:
            raise ValueError(
                "pipelines_per_node with groups drawn across all nodes; remove it, or "
                "use inter_intra = true or schedule = 'static'"
            )
        if "filter_between" in self.model_fields_set and self.slowdown_filter is None:
            raise ValueError(
                "filter_between with slowdown_filter = none, which filters nobody; remove one"
            )
        if "filter_between" in self.model_fields_set and not self.group_division:
            raise ValueError(
                "filter_between without group_division, where a pipeline draws one group at a time "
                "and the filter is its own; remove it, or switch group_division on"
            )
        if self.inter_intra and self.group_size:
            raise ValueError(
                "group_size with inter_intra, whose groups are as large as nodes; remove one"
            )
        if self.inter_intra and not (self.group_division and self.group_buffer):
            raise ValueError(
                "inter_intra: it divides all pipelines and buffers the second phase; switch "
                "group_division and group_buffer on"
            )
        return self


class SemiDecentralizedOptions(Record):
    """``semi_decentralized``: at each stage, the replicas that are ready average their weights.

    SDPipe (Miao et al., VLDB 2023).

    Attributes:
        first_wait_s: initial time for which the first replica waits for others.
        least_wait_s, most_wait_s: limits of the adaptive wait.
        most_members: a group with this many members closes at once; above the number of pipelines
            it means all. None: all.
        guarantee_period: number of member updates, in numbers of pipelines, after which the groups
            since then must have connected all pipelines; the next group waits until they do. None:
            no guarantee.
        overlap: overlap the average with the next iteration, whose gradient is then computed with
            weights from before the average. Nobody waits for a group, unless it takes longer than
            an iteration. SDPipe itself waits for it.
    """

    first_wait_s: Seconds = 0.001
    least_wait_s: Seconds = 0.00001
    most_wait_s: Seconds = 0.01
    most_members: GroupSize | None = None
    guarantee_period: Annotated[int, Field(ge=1, le=10**6)] | None = 10
    overlap: bool = False

    @model_validator(mode="after")
    def _waits_are_in_order(self) -> SemiDecentralizedOptions:
        if not self.least_wait_s <= self.first_wait_s <= self.most_wait_s:
            raise ValueError(
                f"first_wait_s {self.first_wait_s:g} is not between least_wait_s "
                f"{self.least_wait_s:g} and most_wait_s {self.most_wait_s:g}"
            )
        return self


Options = (
    AllReduceOptions
    | FusedOptions
    | DecoupledOptions
    | CrossIterationOptions
    | ParameterServerOptions
    | EagerParameterServerOptions
    | WaveSynchronousOptions
    | AdPsgdOptions
    | PartialAllReduceOptions
    | SemiDecentralizedOptions
)
OPTIONS: Mapping[str, type[Options]] = {
    "all_reduce": AllReduceOptions,
    "fused": FusedOptions,
    "decoupled": DecoupledOptions,
    "cross_iteration": CrossIterationOptions,
    "parameter_server": ParameterServerOptions,
    "eager_parameter_server": EagerParameterServerOptions,
    "wave_synchronous": WaveSynchronousOptions,
    "ad_psgd": AdPsgdOptions,
    "partial_all_reduce": PartialAllReduceOptions,
    "semi_decentralized": SemiDecentralizedOptions,
}
SYNCHRONOUS = ("all_reduce", "fused", "decoupled", "cross_iteration")
"""Synchronous strategies, which run any plan; the others need data-parallel pipelines."""
STALE = ("cross_iteration",)
"""Synchronous strategies whose ranks may be an iteration apart."""
EXAMPLE = "partial_all_reduce:group_size=4,seed=1"
_JSON = {"none": "null", "true": "true", "false": "false"}
"""Values in any case."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}

_OF_COMMANDS = {
    "all": "`pipeplan simulate PLAN --sync all`, which compares strategies",
    "choose": "`pipeplan plan … --sync choose`, which writes a strategy into the plan",
}
"""Words that commands accept instead of a strategy, with these commands."""


def overlaps_averages(options: Options) -> bool:
    """Return whether pipelines average their weights while they compute the next iteration."""
    return (
        isinstance(options, PartialAllReduceOptions | SemiDecentralizedOptions) and options.overlap
    )


def options_of(sync: Sync, source: str = "sync") -> Options:
    """Return the checked options of a strategy.

    Raises:
        PipeplanError: naming an unknown strategy or every wrong option.
    """
    if sync.strategy not in OPTIONS:
        raise PipeplanError(
            f"{source}.strategy: {sync.strategy!r} is not known; expected one of "
            f"{', '.join(OPTIONS)}; --sync also takes {', '.join(PAPERS)}"
        )
    kind, source = OPTIONS[sync.strategy], f"{source}.options of {sync.strategy}"
    known = {name: value for name, value in sync.options.items() if name in kind.model_fields}
    problems = [
        f"{source}: {shorten(name)} is not one of its options; they are {option_kinds(kind)}"
        for name in sync.options
        if name not in known
    ]
    try:
        options = kind.parse(known, source)
    except PipeplanError as error:
        problems += error.problems
    if problems:
        raise PipeplanError(problems)
    return options


def option_kinds(kind: type[Options]) -> str:
    """Describe a strategy's options and their values, such as ``pairs (bipartite or matching)``."""
    return ", ".join(
        f"{name} ({' or '.join(_words(field.annotation))})"
        for name, field in kind.model_fields.items()
    )


def _words(annotation: Any) -> Iterator[str]:
    """Yield the values of a field as people write them."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is Annotated:
        yield from _words(get_args(annotation)[0])
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from _words(part)
    else:
        yield _KINDS[annotation]


def require_fit(sync: Sync, pipelines: int | None) -> None:
    """Refuse options that do not fit the number of pipelines; None: the number is unknown.

    A ``group_size`` or ``most_members`` above the number means all of them.

    Raises:
        PipeplanError: naming the option and both numbers, or as :func:`options_of`.
    """
    options, source = options_of(sync), f"sync.options of {sync.strategy}"
    if pipelines is None:
        return
    match options:
        case (
            ParameterServerOptions(servers=int(servers))
            | EagerParameterServerOptions(servers=int(servers))
            | WaveSynchronousOptions(servers=int(servers))
        ) if servers > pipelines:
            raise PipeplanError(
                f"{source}: servers: {servers}, but there are {plural(pipelines, 'pipeline')}, "
                f"which are the servers; give {pipelines} at most"
            )
        case PartialAllReduceOptions(pipelines_per_node=int(count)) if pipelines % count:
            raise PipeplanError(
                f"{source}: pipelines_per_node: {count} does not divide the "
                f"{plural(pipelines, 'pipeline')} into whole nodes; give a number that does, or "
                "leave it out"
            )


def group_size_of(options: PartialAllReduceOptions, pipelines: int) -> int:
    """Return the size of drawn groups: the option, or a default that leaves nobody out of a few."""
    return options.group_size or max(2, min(3, pipelines // 2))


def parse_sync(text: str) -> Sync:
    """Parse ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``.

    A name may be that of a paper (:mod:`planner.sync.papers`): its options are then those of the
    paper where the given ones leave them open.

    Raises:
        PipeplanError: naming what cannot be read, an unknown strategy or every wrong option.
    """
    name, colon, rest = text.partition(":")
    if name.strip() in _OF_COMMANDS:
        raise PipeplanError(
            f"sync: {name.strip()!r} is of {_OF_COMMANDS[name.strip()]}; give a strategy here, one "
            f"of {', '.join(OPTIONS)}"
        )
    given: dict[str, JsonValue] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not option or not value:
            raise PipeplanError(
                f"sync: {part!r} in {text!r} is not OPTION=VALUE; write it as {EXAMPLE}"
            )
        if option in given:
            raise PipeplanError(
                f"sync: {option} is given twice in {text!r}, as {_written(given[option])} and as "
                f"{value}; give it once"
            )
        given[option] = _value(value)
    if name.strip() in PAPERS and PAPERS[name.strip()].runs != name.strip():
        return _of_paper(parse_sync(PAPERS[name.strip()].runs), given)
    sync = Sync(strategy=name.strip(), options=given)
    options_of(sync, "sync")
    return sync


def _of_paper(sync: Sync, given: Mapping[str, JsonValue]) -> Sync:
    """Return a paper's strategy with the given options, which rule out those that contradict."""
    both = sync.model_copy(update={"options": {**sync.options, **given}})
    alone = sync.model_copy(update={"options": dict(given)})
    try:
        options_of(both, "sync")
    except PipeplanError:
        options_of(alone, "sync")
        return alone
    return both


def sync_name(sync: Sync) -> str:
    """Format a strategy for a command line, such as ``partial_all_reduce:schedule=static``."""
    options = ",".join(f"{name}={_written(value)}" for name, value in sync.options.items())
    return f"{sync.strategy}:{options}" if options else sync.strategy


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _value(text: str) -> str | int | float | bool | None:
    """Parse a JSON value other than a list or table; any other word is text."""
    try:
        value = json.loads(_JSON.get(text.lower(), text))
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | None) else text
