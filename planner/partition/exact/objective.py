"""The iteration time's lower bound, stage by stage: what the model minimises."""

from __future__ import annotations

from collections.abc import Sequence

from planner.partition.exact.decisions import FINE, OBJECTIVE_TICKS, Decisions
from planner.partition.exact.layer_stages import Expression, Literal
from planner.partition.exact.memory import StageMemory
from planner.partition.exact.tails import StageTails
from planner.partition.exact.times import StageTimes
from planner.partition.exact.transfers import StageTransfers

PRICE_STEPS = 1000


class IterationBound:
    """The expression of planner.partition.bounds.schedule_bound_s.

    Where memory may bind also that of planner.partition.bounds.in_flight, with the way home
    behind it.

    Attributes:
        value: the bound in ticks of the objective; the model's objective.
    """

    def __init__(
        self,
        decisions: Decisions,
        times: StageTimes,
        transfers: StageTransfers,
        tails: StageTails,
        memory: StageMemory | None,
    ) -> None:
        self._d = decisions
        self._model = decisions.model
        self._times = times
        self._transfers = transfers
        self._tails = tails
        self.value = decisions.model.new_int_var(0, OBJECTIVE_TICKS + 1, "iteration time")
        self._fine = FINE * self.value + FINE - 1
        self._down = self._ways_down()
        self._home = self._ways_home()
        self._head = self._heads()
        for j in decisions.stages:
            self._take(self._head[j] + times.load[j] + self._home[j], [decisions.active[j]])
            if j + 1 < len(decisions.stages):
                self._bound_channel(j)
            if memory is not None:
                self._bound_in_flight(j, memory)
        self._spread_work()

    def _take(self, time: Expression, literals: Sequence[Literal]) -> None:
        """The iteration takes a time at least, under some literals."""
        self._model.add(self._fine >= time).only_enforce_if(literals)

    def _heads(self) -> list[Expression]:
        """From the iteration's start to the first microbatch's arrival at each stage."""
        heads: list[Expression] = [0]
        for j in self._d.stages[1:]:
            head = self._d.time(f"head {j}")
            before = heads[-1] + self._times.least_forward[j - 1] + self._transfers.send[j - 1]
            self._model.add(head == before).only_enforce_if(self._d.active[j])
            heads.append(head)
        return heads

    def _ways_down(self) -> list[Expression]:
        """From a stage's forward through all later stages and back to its own backward."""
        count = len(self._d.stages)
        down: list[Expression] = [0] * (count + 1)
        for j in reversed(self._d.stages):
            down[j] = self._d.time(f"down {j}")
            there = self._times.least_forward[j] + self._times.least_backward[j]
            self._model.add(down[j] >= there).only_enforce_if(self._d.active[j])
            if j + 1 < count:
                further = there + self._transfers.send[j] + self._transfers.back[j] + down[j + 1]
                self._model.add(down[j] >= further).only_enforce_if(self._d.active[j + 1])
        return down

    def _ways_home(self) -> list[Expression]:
        """From a stage's last backward to the end of the iteration."""
        home: list[Expression] = []
        for j in self._d.stages:
            value = self._d.time(f"home {j}")
            self._model.add(value >= self._tails.tail[j]).only_enforce_if(self._d.active[j])
            if j:
                way = self._transfers.back[j - 1] + self._times.least_backward[j - 1] + home[-1]
                self._model.add(value >= way).only_enforce_if(self._d.active[j])
            home.append(value)
        return home

    def _bound_channel(self, j: int) -> None:
        """Between two single devices all microbatches pass one after the other."""
        replicated = [*self._d.is_replicated(j), *self._d.is_replicated(j + 1)]
        condition: list[Literal] = [self._d.active[j + 1]]
        condition += [~literal for literal in replicated]
        condition += self._transfers.exclusive(j)
        count = self._d.job.microbatches
        send, back = self._transfers.send[j], self._transfers.back[j]
        begin = self._head[j] + self._times.least_forward[j]
        end = self._times.least_backward[j] + self._home[j]
        down = self._down[j + 1]
        self._take(begin + count * send + down + back + end, condition)
        self._take(begin + send + down + count * back + end, condition)

    def _bound_in_flight(self, j: int, memory: StageMemory) -> None:
        """Each block of microbatches in flight takes a round trip; the last also its own work."""
        head, trip, home = self._head[j], self._down[j], self._home[j]
        single = [~literal for literal in self._d.is_replicated(j)]
        for i, level in enumerate(memory.levels):
            chosen = memory.in_flight[j, i]
            before = head + level.blocks * trip
            if level.blocks:
                self._take(before + trip + home, [chosen])
            for k in range(len(self._d.chain.types) if level.blocks else 0):
                work = level.rest * (self._times.forward[k][j] + self._times.backward[k][j])
                used = self._times.uses_type[j, k]
                self._take(before + work + home, [chosen, used, *single])

    def _spread_work(self) -> None:
        """Redundant: the devices' time between head and home must hold all layers' work.

        Work is priced by the dual values of the even-load relaxation; without this constraint
        CP-SAT sees no connection between the stages' loads.
        """
        chain = self._d.chain
        dual = chain.load_prices
        prices = [round(PRICE_STEPS * float(x)) for x in dual / dual.max()]
        ticks = [self._d.ticks(row) for row in chain.work_s]
        work = sum(
            min(price * times[layer] for price, times in zip(prices, ticks, strict=True))
            for layer in range(chain.length)
        )
        time = []
        for d, kind in enumerate(chain.kinds):
            free = self._d.time(f"time of {self._d.devices[d]}")
            holds = [self._d.on[j, d] for j in self._d.stages]
            self._model.add(free <= self._fine)
            self._model.add(free == 0).only_enforce_if([~literal for literal in holds])
            for j, literal in enumerate(holds):
                limit = self._fine - self._head[j] - self._home[j]
                self._model.add(free <= limit).only_enforce_if(literal)
            time.append(prices[kind] * free)
        self._model.add(sum(time) >= self._d.job.microbatches * work)
