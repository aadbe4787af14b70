"""A program: the tasks of one iteration, with what they wait for, in arrays.

A program is a block (:mod:`planner.program.compiled`), so compiled code fills it in and replays it
without Python. Its tables and the fields of their rows are declared here; numbers are counted from
0, and -1 means none. All seconds, bytes and GB/s are those of the documents.

**Tasks** have one of five roles.

- ``COMPUTE``: runs on a device (``resource``), which runs one task at a time.
- ``FLOW``: a message, a reduction of gradients or a copy over a host link. ``resource`` is its way
  (:data:`WAY`). It stands in all lines of its way, in the order of requests, and sets off when it
  is the first in all of them; its bytes then share the links of the way fairly.
- ``LATE_FLOW``: a flow that is requested only after all that starts at the same moment has
  started: reductions and all-gathers, which are requested in the order of their numbers.
- ``JOIN``: takes no time; done as soon as it waits for nothing more (messages that stay on a
  device, the end of an exchange that blocks, the last backward of a device).
- ``STEP``: the optimizer step of a device, after all its other tasks. What waits for one
  (all-gathers) is replayed after all else.

A task waits for ``waits`` others; each of these names it once among its *successors*,
``SUCCESSORS[successor:successor_end]``, which it releases in that order when it ends. ``at_start``
is one more task, which it releases when it starts.

**Order of numbers.** Events of one moment are handled in the order of tasks' numbers: so tasks are
numbered by (stage, kind as letters sort, microbatch), a message directly after the task that it
goes to; then copies over host links; from ``first_late`` on reductions, then optimizer steps, then
all-gathers.

**Which task a device runs next.** With ``mode == IN_ORDER`` the next of
``ORDER[device.order:device.order_end]``. With ``BY_PRIORITY`` these places are room for as many
tasks; every replica has three queues (``slot``: 0 forward, 1 backward or input gradient, 2 weight
gradient) of tasks that wait for nothing, and the device takes the head with the lowest
``priority`` (of equal ones that of the lower microbatch, then the lower number) that ``limit``,
``most_owed`` and memory allow. Priorities of a queue must not fall from task to task. A message
with ``slot == 1`` holds its sender (``end_device`` of its effect) until it has arrived; in a given
order the next task waits for that by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.costs.roofline import KINDS as KINDS
from planner.program.compiled import Block, block

COMPUTE, FLOW, LATE_FLOW, JOIN, STEP = range(5)
IN_ORDER, BY_PRIORITY = range(2)


def record(**fields: str) -> np.dtype[Any]:
    """Return the kind of a record of a table, by the kinds of numbers of its fields."""
    kinds = {
        "f8": np.float64, "i8": np.int64, "i4": np.int32, "i2": np.int16, "i1": np.int8,
    }  # fmt: skip
    names = [(name, kinds[kind]) for kind, names in fields.items() for name in names.split()]
    return np.dtype(names, align=True)


TASK = record(
    f8="seconds",  # alone, at the full rate
    i8="priority",  # BY_PRIORITY: the lowest runs first
    i4="""resource effect successor successor_end waits at_start group replica microbatch""",
    i2="makes stage",
    i1="role kind slot",
)
"""A task.

``effect`` is its row of :data:`EFFECT`; ``group`` its row of GROUPS, whose devices start such tasks
together; ``makes`` the row of :data:`AHEAD` if it makes gradients of weights (whole backward or
weight gradient), else -1; ``kind`` the number of its letter in KINDS (a message: of the operation
that needs it, F or B).
"""

EFFECT = record(i8="start_bytes end_bytes", i4="start_device end_device")
"""Bytes that a device holds more (less: negative) when a task starts, and when it ends."""

DEVICE = record(
    i8="static_bytes capacity_bytes reserve_bytes",
    # Times as long: while it communicates; its messages while it computes (1: no matter).
    f8="compute_slowdown message_slowdown",
    # `host`: its row of HOSTS if that slows devices which compute at once; `step`: its task.
    i4="order order_end replica replica_end step host",
    i1="is_slowed",  # whether any of the three can differ from 1
)

REPLICA = record(
    i8="""stash_bytes weight_stash_bytes input_bytes output_bytes input_gradient_bytes
        output_gradient_bytes""",
    f8="most_owed",
    # `makers` of its buckets; `microbatches` that it runs; `limit` of those in flight.
    i4="device stage microbatches maker maker_end limit",
    i1="is_split",
)
"""A stage on one of its devices. What only BY_PRIORITY reads may be left out IN_ORDER: all but
``device``, ``microbatches``, ``maker`` and ``maker_end``."""

WAY = record(
    f8="latency_s gb_per_s",  # before the first byte; alone
    i4="link link_end once once_end line line_end device device_end",
)
"""What a flow crosses: WAY_LINKS that may slow it, as often as it crosses them, and in WAY_ONCE
each of these once; WAY_LINES it stands in; WAY_DEVICES that communicate meanwhile (only those that
are slowed or slow it need be named)."""

GROUP = record(i4="device device_end")
"""Devices that start a stage's operations of one kind together, in GROUP_DEVICES."""

HOST = record(i4="slowdown")
"""First place in SLOWDOWNS: how many times as long each takes while 1, 2, ... devices compute."""

INT, REAL = np.dtype(np.int32), np.dtype(np.float64)

(
    PROGRAM, TASKS, SUCCESSORS, DEVICES, ORDER, DEVICE_REPLICAS, REPLICAS, MAKERS, AHEAD, EFFECTS,
    WAYS, WAY_LINKS, WAY_ONCE, WAY_LINES, WAY_DEVICES, LINK_GB_PER_S, LINK_NUMBERS, GROUPS,
    GROUP_DEVICES, HOSTS, SLOWDOWNS,
) = block(
    # How many rows of each table count; `makers` is the length of a row of AHEAD. `line_nodes`
    # and `link_nodes` are the sums over all flows of the lengths of their lines and WAY_ONCE,
    # `link_uses` that of their WAY_LINKS. `is_slowed`: some device is.
    "mode devices tasks first_late replicas makers effects ways links lines groups hosts"
    " line_nodes link_nodes link_uses is_slowed",
    tasks=TASK, successors=INT, devices=DEVICE, order=INT, device_replicas=INT, replicas=REPLICA,
    # MAKERS: the reduction of each; one of them waits for all of its makers. AHEAD[makes, maker]:
    # seconds before its end at which a task has made it, if it is the last of its replica.
    makers=INT, ahead=REAL, effects=EFFECT,
    ways=WAY, way_links=INT, way_once=INT, way_lines=INT, way_devices=INT, link_gb_per_s=REAL,
    # LINK_NUMBERS: what each link is in the network's table.
    link_numbers=INT,
    groups=GROUP, group_devices=INT, hosts=HOST, slowdowns=REAL,
)  # fmt: skip


class Program(Block):
    """The tasks of one iteration.

    Args:
        rows: room of each table, by its number; tables that are not named have none. A program
            may be filled in again and again: ``numbers`` say how many rows count.
        names: of the devices, for people.
    """

    def __init__(self, rows: Mapping[int, int], names: Sequence[str] = ()) -> None:
        super().__init__(PROGRAM, rows)
        self.names = names

    @property
    def tasks(self) -> np.ndarray[Any, Any]:
        """The tasks, records of :data:`TASK`."""
        return self[TASKS][: self.numbers["tasks"]]

    @property
    def devices(self) -> np.ndarray[Any, Any]:
        """The devices, records of :data:`DEVICE`."""
        return self[DEVICES][: self.numbers["devices"]]
