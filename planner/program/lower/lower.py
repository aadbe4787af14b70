"""From placed stages, a network and a schedule to a program: all passes, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.costs.network_table import NetworkTable
from planner.costs.placed_pipeline import PlacedPipeline
from planner.errors import PipeplanError
from planner.plan.operations import Orders
from planner.program.compiled import Block, compiled, entry, header, pointer
from planner.program.lower.exchanges import fill_exchanges
from planner.program.lower.links import fill_links
from planner.program.lower.messages import fill_messages
from planner.program.lower.offload import fill_copies, offloads
from planner.program.lower.operations import fill_devices, fill_operations, number_tasks
from planner.program.lower.placed import stage_rows
from planner.program.lower.reductions import fill_joins, fill_reductions, wait_for_sends
from planner.program.lower.room import ROOM, join_edges, room_for
from planner.program.lower.weights import fill_groups
from planner.program.lower.wires import wires_of
from planner.program.program import PROGRAM, Program
from planner.program.schedule import fixed_orders
from planner.program.stage_rows import ROWS


@compiled
def lower(rows: Any, schedule: Any, wires: Any, program: Any, work: Any) -> bool:
    """Make a program; return False if devices that exchange messages have no path.

    Args:
        rows: pointer to the tables of stages (:mod:`planner.program.stage_rows`).
        schedule: pointer to a schedule (:mod:`planner.program.schedule`).
        wires: pointer to the tables of the network (:mod:`planner.program.lower.wires`).
        program: pointer to a program with enough room.
        work: pointer to room for the passes (:mod:`planner.program.lower.room`).
    """
    numbers, state = header(program, PROGRAM), header(work, ROOM)
    _begin(rows, wires, program, work)
    n = number_tasks(rows, schedule, work)
    fill_devices(rows, schedule, wires, program, work)
    fill_operations(rows, schedule, program, work)
    if not fill_messages(rows, schedule, wires, program, work):
        return False
    fill_groups(rows, program, n)
    state.first_copy = n
    n = fill_copies(rows, schedule, program, work, n)
    state.first_exchange = n
    n = fill_exchanges(rows, schedule, program, work, n)
    n = fill_joins(rows, schedule, program, work, n)
    numbers.tasks = fill_reductions(rows, program, work, n)
    wait_for_sends(rows, schedule, program, work)
    fill_links(rows, wires, program, work)
    join_edges(program, work)
    return True


@compiled
def _begin(rows: Any, wires: Any, program: Any, work: Any) -> None:
    """Begin with no edges and ways, and with the lines of devices that there are.

    First come those in which reductions stand.
    """
    h, state, numbers = header(rows, ROWS), header(work, ROOM), header(program, PROGRAM)
    state.n_edges = state.way_lines = state.way_devices = 0
    numbers.ways = 0
    state.stream_lines = h.devices if h.reductions else 0
    state.copy_lines = state.stream_lines + (h.devices if h.one_stream else 0)
    state.pair_lines = state.copy_lines + (h.devices if offloads(rows) else 0)
    numbers.lines = state.pair_lines


@entry
def lower_once(rows: Any, schedule: Any, wires: Any, program: Any, work: Any) -> bool:
    """Make a program; the arguments are headers of blocks."""
    return lower(pointer(rows), pointer(schedule), pointer(wires), pointer(program), pointer(work))


@dataclass(frozen=True)
class Lowered:
    """A program, and what it was made from: numbers of its tasks count there.

    Attributes:
        program: the tasks.
        placed: the stages.
        network: whose directed links the program's links are.
        rows, schedule, wires, room: the blocks, which have to live as long as they are used.
    """

    program: Program
    placed: PlacedPipeline
    network: NetworkTable
    rows: Block
    schedule: Block
    wires: Block
    room: Block

    @property
    def copies(self) -> range:
        """The tasks that are copies of offloaded stashes."""
        numbers = self.room.numbers
        return range(int(numbers["first_copy"]), int(numbers["first_exchange"]))


def lower_orders(
    placed: PlacedPipeline,
    orders: Orders,
    by_length: Sequence[PlacedPipeline] = (),
    length_of: Sequence[int] = (),
) -> Lowered:
    """Return the program of placed stages in given orders.

    Args:
        placed: the stages.
        orders: operations by device.
        by_length: the same stages with the times and messages of each length of microbatches.
        length_of: which of these each microbatch has.

    Raises:
        PipeplanError: if the runtime has a rule that programs do not have, or devices that exchange
            messages have no path.
    """
    stages = [stage.spec.devices for stage in placed.stages]
    run = max((row.microbatch + 1 for order in orders.values() for row in order), default=0)
    counted = placed if run <= placed.microbatches else replace(placed, microbatches=run)
    schedule = fixed_orders(orders, stages, placed.devices, counted.microbatches)
    return replace(lower_schedule(counted, schedule, by_length, length_of), placed=placed)


def lower_schedule(
    placed: PlacedPipeline,
    schedule: Block,
    by_length: Sequence[PlacedPipeline] = (),
    length_of: Sequence[int] = (),
) -> Lowered:
    """Return the program of placed stages by a schedule; arguments as :func:`lower_orders`."""
    network = NetworkTable.of(placed.problem.cluster)
    rows, wires = stage_rows(placed, by_length, length_of), wires_of(network)
    program, room = room_for(rows, wires, placed.devices)
    blocks = (rows, schedule, wires, program, room)
    if not lower_once(*(block.header for block in blocks)):
        raise PipeplanError(
            "no path of links and switches joins some devices that hold neighbouring stages; add a "
            "link to the cluster or choose other devices"
        )
    return Lowered(program, placed, network, rows, schedule, wires, room)
