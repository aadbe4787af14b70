"""One thread's walk: its memory, made once, and the calls into compiled code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import StageTable
from planner.plan.plan import Sync, overlapped_bucket_bytes
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RuntimeBehaviour
from planner.program.compiled import Block as Tables
from planner.program.layout import Layout
from planner.program.lower.gradient_tables import gradient_rows, gradient_tables
from planner.program.lower.room import room_for
from planner.program.lower.wires import wires_of
from planner.program.schedule import ORDER_CODES, ORDER_START, schedule_for
from planner.program.stage_rows import (
    DEVICE,
    rows_for,
    set_rules,
)
from planner.search.orders.anneal import anneal
from planner.search.orders.memory import BEST_CODES, RANDOM, OrderMemory, seed_random
from planner.search.orders.replay import replay_schedule
from planner.search.walk import memory as m
from planner.search.walk.block import HEADER, Block, block_for, devices_of, filled
from planner.search.walk.freedoms import Freedoms, places_of
from planner.search.walk.judge import judge_layout, prepare
from planner.search.walk.memory import MOST_OWNERS, WALK, write
from planner.search.walk.starts import Start
from planner.search.walk.steps import BOUND, JUDGE, SCHEDULE_AGAIN, WALK_ON, run_walk

MOST_KNOWN = 1 << 18
"""Layouts whose times are remembered."""
MANY = 1e15
"""More tasks than are ever replayed."""


class Candidate(NamedTuple):
    """A layout with its time."""

    seconds: float
    block: Block

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of stages and of devices, by which layouts count as unlike."""
        return int(self.block[0]), int(self.block[1])


class Walker:
    """A walk with all memory that it needs; one thread uses it at a time.

    Args:
        problem: the model, cluster and job; replicas share state in all plans or in none.
        table: what its stages cost.
        network: its devices and links.
        freedoms: the stages that there may be.
        seed: of random numbers.
    """

    def __init__(
        self,
        problem: Problem,
        table: StageTable,
        network: NetworkTable,
        freedoms: Freedoms,
        seed: int,
    ) -> None:
        self.problem, self.freedoms = problem, freedoms
        stages, devices = freedoms.max_stages, len(network.devices)
        replicas = devices * freedoms.most_on_device
        microbatches = problem.job.microbatches
        wires = wires_of(network)
        buckets = [_bucket_bytes(problem, row) for row in _behaviours(problem)]
        gradients = gradient_tables(table, buckets[0] or buckets[1], stages)
        self._rows = gradient_rows(table, gradients, wires, stages, replicas, microbatches)
        self._rows.numbers["classes"] = 1
        self._schedule = schedule_for(stages, replicas, devices, microbatches)
        program, room = room_for(self._rows, wires)
        self._empty = block_for(stages, replicas)
        links = len(network.links)
        self.memory = _memory(
            stages, replicas, devices, links, len(table.types), microbatches, table
        )
        parts = (self._rows, self._schedule, wires, program, room)
        self.orders = OrderMemory(*parts, replay_schedule)
        self.orders.numbers["blocks"] = problem.runtime.blocks
        self.orders.numbers["equal"] = freedoms.least_equal > 0
        self._blocks = {
            "table": table.block,
            "rows": self._rows,
            "schedule": self._schedule,
            "wires": wires,
            "gradients": gradients,
            "program": program,
            "work": self.orders.work,
            "orders": self.orders,
        }
        for name, block in self._blocks.items():
            self.memory.numbers[name] = block.header.ctypes.data
        called = {
            "prepare": prepare,
            "judge": judge_layout,
        }
        for field, part in called.items():
            self.memory.numbers[f"{field}_at"] = part.address
        _write_freedoms(self.memory, problem, freedoms)
        _write_costs(self.memory, problem, table, network)
        for table_of in (m.WHOLE, m.PIPELINE, m.HERE, m.TRIED, m.BEST):
            self.memory[table_of][:] = self._empty
        seed_random(self.memory, m.RANDOM, seed)
        seed_random(self.orders, RANDOM, seed)

    @property
    def tasks_done(self) -> int:
        """Work that was done, in tasks replayed."""
        return int(self.memory.numbers["tasks"] + self.orders.numbers["tasks"])

    @property
    def layouts_judged(self) -> int:
        """Layouts that were judged."""
        return int(self.memory.numbers["layouts"])

    @property
    def best(self) -> Candidate:
        """The best layout that this walker has judged since it was told where to stand."""
        seconds = float(self.memory.numbers["best_s"])
        return Candidate(seconds, self.memory[m.BEST].copy())

    def start(
        self, start: Start, best_s: float = np.inf, most_s: float = np.inf, tasks: float = MANY
    ) -> Candidate | None:
        """Judge a layout to start from; return None if it is none, or fits no memory.

        Args:
            start: the layout.
            best_s: time of another one; the slower it is than this, the fewer schedules are tried.
            most_s: what takes longer is None as well.
            tasks: number of tasks replayed after which no more schedules are tried.
        """
        self.memory[m.TRIED][:] = filled(self._empty, start.ends, start.devices)
        seconds = self._judged_s(best_s, most_s, tasks)
        if seconds == np.inf:
            return None
        return Candidate(seconds, self.memory[m.TRIED].copy())

    def _judged_s(self, best_s: float, most_s: float, tasks: float) -> float:
        numbers = self.memory.numbers
        numbers["best_s"], numbers["most_s"] = best_s, most_s
        numbers["until_tasks"] = int(self.orders.numbers["tasks"] + min(tasks, MANY))
        return float(run_walk(self.memory.header, JUDGE, 0.0, 0))

    def looked_at(self, candidate: Candidate, tasks: float) -> Candidate:
        """Return a candidate, by a better schedule if its stages have one."""
        self.memory[m.TRIED][:] = candidate.block
        seconds = self._judged_s(candidate.seconds, candidate.seconds, tasks)
        if seconds >= candidate.seconds:
            return candidate
        return Candidate(seconds, self.memory[m.TRIED].copy())

    def bound_s(self, start: Start) -> float:
        """Return a lower bound on the time of a layout; infinite if it is none."""
        self.memory[m.TRIED][:] = filled(self._empty, start.ends, start.devices)
        return float(run_walk(self.memory.header, BOUND, 0.0, 0))

    def stand_at(self, candidate: Candidate) -> None:
        """Have the walk go on from a layout, and forget what it has found."""
        self.memory[m.HERE][:] = candidate.block
        self.memory[m.BEST][:] = candidate.block
        self.memory.numbers["here_s"] = self.memory.numbers["best_s"] = candidate.seconds

    def walk(self, heat: float, tasks: int) -> None:
        """Walk until so many tasks were replayed."""
        run_walk(self.memory.header, WALK_ON, heat, tasks)

    def layout(self, candidate: Candidate) -> tuple[float, Layout]:
        """Return a candidate's time and its layout, by the schedule that was chosen."""
        self.memory[m.TRIED][:] = candidate.block
        seconds = float(run_walk(self.memory.header, SCHEDULE_AGAIN, 0.0, 0))
        self.orders.numbers["best_s"] = np.inf
        return seconds, self._layout()

    def polish(self, heat: float, tries: int) -> float:
        """Anneal the orders of the layout asked for last; return the time of the best ones."""
        return float(anneal(self.orders.header, heat, tries))

    def polished_layout(self) -> Layout:
        """Return the layout with the best orders that annealing has found."""
        codes = self._schedule[ORDER_CODES]
        # Annealing goes on from the order that its program has, which need not be the best.
        now = codes.copy()
        codes[:] = self.orders[BEST_CODES]
        found = self._layout()
        codes[:] = now
        return found

    def _layout(self) -> Layout:
        whole, schedule = self.memory[m.WHOLE], self._schedule
        count, room = int(whole[0]), int(whole[2])
        starts = schedule[ORDER_START].tolist()
        used = self._rows[DEVICE]["number"][: self._rows.numbers["devices"]].tolist()
        orders = {
            device: tuple(schedule[ORDER_CODES][a:b].tolist())
            for device, (a, b) in zip(used, pairwise(starts), strict=False)
        }
        limits = [whole[HEADER + n * room : HEADER + n * room + count] for n in (1, 2)]
        return Layout(
            ends=tuple(whole[HEADER : HEADER + count].tolist()),
            devices=tuple(tuple(devices_of(whole, s)) for s in range(count)),
            limits=tuple(zip(*(row.tolist() for row in limits), strict=True)),
            orders=orders,
            microbatches=self.problem.job.microbatches,
        )


def _memory(
    stages: int,
    replicas: int,
    devices: int,
    links: int,
    types: int,
    microbatches: int,
    table: StageTable,
) -> Tables:
    """Return memory for walks over so many stages, replicas and devices at most."""
    layers, size = len(table.layers), stages * microbatches
    groups, head = max(replicas, devices, microbatches), len(block_for(stages, replicas))
    by_device = (
        m.CLASS_OF, m.PLACE_OF, m.NODE_OF, m.PRICE, m.TYPE_OF, m.CAPACITY_BYTES,
        m.OPTIMIZER_GB_PER_S, m.HOST_LINK_GB_PER_S, m.GROUP_DEVICES, m.PLACE, m.NEEDS,
        m.FIRST_STAGE, m.HELD,
    )  # fmt: skip
    by_replica = (m.DEVICE_OF, m.EACH_S, m.ISLAND, m.COUNTS)
    by_group = (m.FINISH_S, m.SLOWEST_S, m.SHARE, m.USED)
    return Tables(
        WALK,
        {
            m.MAY_CUT: layers + 1,
            m.ALLOWED_LAYERS: devices * (layers + 1),
            m.APART: devices**2,
            m.UNLINKED: devices**2,
            m.ISLANDS: 2 * devices,
            **dict.fromkeys(by_device, devices),
            **dict.fromkeys(
                (m.GATHER_LATENCY_S, m.GATHER_GB_PER_S, m.SUM_LATENCY_S, m.SUM_GB_PER_S),
                2 * devices,
            ),
            m.HOST_S: 6,
            m.RULES: 12,
            **dict.fromkeys(by_replica, replicas),
            **dict.fromkeys((m.FIRST,), stages + 1),
            m.STAGE_FIGURES: stages * types,
            m.OWNERS: MOST_OWNERS * size,
            **dict.fromkeys(by_group, groups),
            m.LINK_S: links,
            **dict.fromkeys((m.HOMES, m.MICROBATCH), microbatches),
            **dict.fromkeys((m.ORDER,), 3 * size),
            m.STARTS: devices + 1,
            **dict.fromkeys((m.WHOLE, m.PIPELINE, m.HERE, m.TRIED, m.BEST), head),
            **dict.fromkeys((m.KEYS, m.KNOWN_S), MOST_KNOWN),
            m.RANDOM: 1,
        },
    )


def _write_freedoms(memory: Tables, problem: Problem, freedoms: Freedoms) -> None:
    job, numbers = problem.job, memory.numbers
    for field in Freedoms._fields:
        value = getattr(freedoms, field)
        if isinstance(value, np.ndarray):
            write(memory, getattr(m, field.upper()), value)
        else:
            numbers[field] = value
    islands = [row for row in places_of(problem) if len(set(row.tolist())) > 1]
    write(memory, m.ISLANDS, islands)
    devices = len(freedoms.class_of)
    rules = {
        "devices": devices,
        "places": len(islands),
        "has_apart": bool(freedoms.apart.size),
        "has_unlinked": bool(freedoms.unlinked.size),
        "has_sizes": bool(problem.graph.record.on_types),
        "has_rules": freedoms.most_nodes < devices or freedoms.most_price < np.inf,
        "may_split": job.splits,
        "may_stay_whole": job.backward != "split",
        "is_1f1b": job.order == "1f1b",
        "blocks": problem.runtime.blocks,
        "may_rerun": bool(job.recompute),
        "may_offload": job.offload is True,
        "in_blocks": job.recompute == "blocks",
        "shares_state": job.shards_state,
        "divides": job.shards_parameters,
        "problem_copies": problem.copies,
        "here_s": np.inf,
        "best_s": np.inf,
    }
    for name, number in rules.items():
        numbers[name] = number


def _write_costs(
    memory: Tables, problem: Problem, table: StageTable, network: NetworkTable
) -> None:
    memory.numbers["types"], memory.numbers["layers"] = len(table.types), len(table.layers)
    for name in (
        "type_of capacity_bytes optimizer_gb_per_s host_link_gb_per_s gather_latency_s "
        "gather_gb_per_s sum_latency_s sum_gb_per_s group_devices"
    ).split():
        write(memory, getattr(m, name.upper()), getattr(network, name))
    write(memory, m.HOST_S, [_host_s(row) for row in _behaviours(problem)])
    write(memory, m.RULES, [_rule_numbers(problem, row) for row in _behaviours(problem)])


def _behaviours(problem: Problem) -> tuple[RuntimeBehaviour, RuntimeBehaviour]:
    """Return how the runtime runs one stage a device, and several."""
    runtime = problem.runtime
    return runtime.behaviour, runtime.interleaved or runtime.behaviour


def _bucket_bytes(problem: Problem, behaviour: RuntimeBehaviour) -> float | None:
    return overlapped_bucket_bytes(problem.job, Sync(), behaviour)


def _host_s(behaviour: RuntimeBehaviour) -> tuple[float, float, float]:
    rate = behaviour.message_copy_gb_per_s
    bytes_a_second = rate * 1e9 if rate else np.inf
    return behaviour.computation_s, behaviour.message_us * 1e-6, bytes_a_second


def _rule_numbers(problem: Problem, behaviour: RuntimeBehaviour) -> list[int]:
    """Return the numbers of a runtime's rules in the tables of rows, and whether it has buckets."""
    rows: Any = rows_for(0, 0, 0, 0)
    set_rules(rows, behaviour)
    names = ("send_blocks", "receive_blocks", "exchange", "one_stream", "reduction_rule")
    has_buckets = _bucket_bytes(problem, behaviour) is not None
    return [*(int(rows.numbers[name]) for name in names), int(has_buckets)]
