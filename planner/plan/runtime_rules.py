"""What a runtime does with messages, gradients and its host: rules of the replay, as data.

docs/runtimes.md has the source of each rule, and docs/replay.md says what it does to a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from planner.cluster.hardware import Positive
from planner.job import Runtime
from planner.records.document import Record, left_out
from planner.records.formats import read_formatted

FORMAT = "pipeplan-runtime/1"
Way = Literal["overlapped", "blocking"]
HostTime = Annotated[float, Field(ge=0, le=1e9)]


GroupMessages = Literal["whole", "parts"]
"""How a tensor that all devices of a tensor-parallel group have whole is sent to another group."""
TiedReduction = Literal["at_once", "in_turn"]
"""Whether replicas and stages that hold a tied parameter reduce its gradient in one go."""
"""How messages and reductions use a link: at once, max-min fairly, or one after the other."""


class RuntimeBehaviour(Record):
    """The rules by which a runtime runs the operations of a plan.

    Attributes:
        send: ``overlapped``: a device goes on while its message is sent; ``blocking``: it computes
            nothing until the message has arrived.
        receive: ``overlapped``: receives are posted in advance; ``blocking``: a message sets off
            once its receiver has come to the operation that needs it.
        exchange: Where both block, what a device sends and receives at once between two operations.
            ``single``: it sends, then it receives; ``neighbour``: both at once if they are with the
            same device; ``together``: both at once; ``pairs``: the same, but a forward and the
            backward that follows it have no exchange between them.
        streams: ``one``: a device sends or receives one message at a time; ``several``: any number.
        reduction: When gradients may be reduced. ``bucket``: as the job and the synchronisation
            strategy say, buckets while the last backward runs included; ``stage``: after the
            stage's last backward; ``device``: after all that the device runs and sends; ``flush``:
            after all that all devices run and send.
        computation_us: Host time in every operation, in addition to its own.
        message_us: Host time in every message that has bytes, in addition to its own.
        message_copy_gb_per_s: Bandwidth at which hosts copy every message, in addition to its own
            time and to ``message_us``, in 10^9 bytes/s; null: they do not, or it is not known.
    """

    send: Way = "overlapped"
    receive: Way = "overlapped"
    exchange: Literal["single", "neighbour", "together", "pairs"] = "single"
    streams: Literal["one", "several"] = "several"
    reduction: Literal["bucket", "stage", "device", "flush"] = "bucket"
    computation_us: HostTime = 0.0
    message_us: HostTime = 0.0
    message_copy_gb_per_s: Positive | None = left_out(None)

    @model_validator(mode="after")
    def _exchanges_block(self) -> RuntimeBehaviour:
        if self.exchange != "single" and not (self.send == self.receive == "blocking"):
            raise ValueError(
                f'exchange = "{self.exchange}" has no effect where sends or receives overlap; set '
                'send = "blocking" and receive = "blocking", or leave exchange out'
            )
        return self

    @property
    def blocks(self) -> bool:
        """Whether devices wait for messages that they send or receive."""
        return "blocking" in (self.send, self.receive)

    @property
    def computation_s(self) -> float:
        """Host time of an operation in seconds."""
        return self.computation_us * 1e-6

    def message_s(self, bytes_: int) -> float:
        """Return the host time of a message in seconds."""
        copied_s = bytes_ / (self.message_copy_gb_per_s * 1e9) if self.message_copy_gb_per_s else 0
        return self.message_us * 1e-6 + copied_s


class RuntimeRules(Record):
    """A runtime: what it can express of a plan, and how it runs it.

    Attributes:
        format: ``pipeplan-runtime/1``.
        name: Name of the runtime, for people.
        expresses: The runtime whose plans it can run: a search narrows the job's freedoms to these.
        source: Where its behaviour is from, such as files and a version; nothing reads it.
        behaviour: How it runs a plan.
        interleaved: How it runs a plan in which a device holds several stages; null: likewise.
        links: ``fair``: messages and reductions that meet on a link share it (max-min fair rates).
        group_messages: How tensor-parallel groups send a tensor that each of their devices has
            whole. ``whole``: each device sends all of it; ``parts``: each sends another part, and
            the devices that receive them gather the whole (scatter-gather of Narayanan et al. 2021,
            section 4.1).
        tied: How gradients of a parameter that several stages hold are reduced. ``at_once``: among
            all devices that hold it; ``in_turn``: among the replicas of each stage, with the
            stage's other gradients, then replica by replica among the stages, where these have as
            many replicas.
    """

    format: Literal["pipeplan-runtime/1"] = "pipeplan-runtime/1"
    name: Annotated[str, Field(min_length=1)] = "pipeplan"
    expresses: Runtime = "pipeplan"
    source: str = ""
    behaviour: RuntimeBehaviour = RuntimeBehaviour()
    interleaved: RuntimeBehaviour | None = None
    links: Literal["fair"] = "fair"
    group_messages: GroupMessages = left_out("whole")
    tied: TiedReduction = left_out("at_once")

    @classmethod
    def load(cls, path: str | Path) -> RuntimeRules:
        """Read a runtime file: TOML as people write it, or JSON.

        Raises:
            PipeplanError: naming every wrong field.
        """
        return cls.parse(read_formatted(path, FORMAT), str(path))

    @property
    def blocks(self) -> bool:
        """Whether messages block in some plan."""
        return self.behaviour.blocks or bool(self.interleaved and self.interleaved.blocks)

    @property
    def may_be_faster(self) -> bool:
        """Whether messages or reductions may be less than in Pipeplan's own executor.

        In parts less is sent, and reductions in turn may send less over slow links.
        """
        return self.group_messages == "parts" or self.tied == "in_turn"

    @property
    def lacks_host_times(self) -> bool:
        """Whether host times are 0 because none are known: of runtimes of others, by name."""
        rows = (self.behaviour, self.interleaved or self.behaviour)
        is_named = self.name in RULES and self.name != PIPEPLAN.name
        return is_named and not any(
            row.computation_us or row.message_us or row.message_copy_gb_per_s for row in rows
        )

    @property
    def overlapped(self) -> RuntimeRules:
        """The same runtime, if its messages did not block."""
        ways = {"send": "overlapped", "receive": "overlapped", "exchange": "single"}
        rows = (self.behaviour, self.interleaved)
        behaviour, interleaved = (row and row.model_copy(update=ways) for row in rows)
        return self.model_copy(update={"behaviour": behaviour, "interleaved": interleaved})

    def behaviour_on(self, devices_of_stages: Iterable[Iterable[str]]) -> RuntimeBehaviour:
        """Return how a plan is run, given the devices of each of its stages."""
        held = Counter(device for devices in devices_of_stages for device in set(devices))
        is_interleaved = max(held.values(), default=0) > 1
        return self.interleaved or self.behaviour if is_interleaved else self.behaviour


PIPEPLAN = RuntimeRules()
"""Our own executor (executor/runtime/runtime.py), as which plans have always been predicted.

It drops gradients after each step (executor/training/master_weights.py); memory counts them at all
times.
"""
_IN_TURN = RuntimeBehaviour(
    send="blocking", receive="blocking", exchange="neighbour", reduction="device"
)
_TORCH_SOURCE = (
    "torch 2.13, torch/distributed/pipelining/schedules.py: _PipelineScheduleRuntime, _batch_p2p, "
    "_add_reduce_grad; torch/optim/optimizer.py: zero_grad"
)
_MEGATRON_SOURCE = (
    "Megatron-LM 00611e6, megatron/core/pipeline_parallel/schedules.py and p2p_communication.py, "
    "megatron/training/arguments.py"
)
RULES: Mapping[str, RuntimeRules] = MappingProxyType(
    {
        "pipeplan": PIPEPLAN,
        "torch": RuntimeRules(
            name="torch",
            expresses="torch",
            source=_TORCH_SOURCE,
            behaviour=RuntimeBehaviour(reduction="stage"),
        ),
        "torchtitan": RuntimeRules(
            name="torchtitan",
            expresses="torchtitan",
            source=_TORCH_SOURCE,
            behaviour=RuntimeBehaviour(reduction="stage"),
        ),
        "megatron": RuntimeRules(
            name="megatron",
            expresses="megatron",
            source=_MEGATRON_SOURCE,
            behaviour=_IN_TURN,
            interleaved=RuntimeBehaviour(reduction="device"),
            tied="in_turn",
        ),
        "megatron-blocking": RuntimeRules(
            name="megatron-blocking",
            expresses="megatron",
            source=f"{_MEGATRON_SOURCE}, with --no-overlap-p2p-communication",
            behaviour=_IN_TURN,
            interleaved=_IN_TURN.model_copy(update={"exchange": "pairs"}),
            tied="in_turn",
        ),
        "deepspeed": RuntimeRules(
            name="deepspeed",
            expresses="deepspeed",
            source="DeepSpeed 03f6f75, deepspeed/runtime/pipe/schedule.py, engine.py and p2p.py",
            behaviour=_IN_TURN.model_copy(update={"streams": "one"}),
            group_messages="parts",
            tied="in_turn",
        ),
    }
)
"""The runtimes that have a name. Megatron-LM overlaps messages in interleaved 1F1B alone."""
