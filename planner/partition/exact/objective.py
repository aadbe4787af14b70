"""The iteration time's lower bound, stage by stage: what the model minimises."""

from __future__ import annotations

from ortools.sat.python import cp_model

from planner.partition.exact.decisions import Decisions, Expression
from planner.partition.exact.tails import StageTails
from planner.partition.exact.times import StageTimes
from planner.partition.exact.transfers import StageTransfers

PRICE_STEPS = 1000


class IterationBound:
    """The expression of planner.partition.bounds.schedule_bound_s.

    Attributes:
        value: the bound in ticks; the model's objective.
    """

    def __init__(
        self,
        decisions: Decisions,
        times: StageTimes,
        transfers: StageTransfers,
        tails: StageTails,
    ) -> None:
        self._d = decisions
        self._model = decisions.model
        self._times = times
        self._transfers = transfers
        self._tails = tails
        self.value = decisions.time("iteration time")
        self._down = self._ways_down()
        self._home = self._ways_home()
        self._head = self._heads()
        for j in decisions.stages:
            bound = self._head[j] + times.load[j] + self._home[j]
            self._model.add(self.value >= bound).only_enforce_if(decisions.active[j])
            if j + 1 < len(decisions.stages):
                self._bound_channel(j)
        self._spread_work()

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
        condition: list[cp_model.LiteralT] = [self._d.active[j + 1]]
        condition += [~literal for literal in replicated]
        condition += self._transfers.exclusive(j)
        count = self._d.job.microbatches
        send, back = self._transfers.send[j], self._transfers.back[j]
        begin = self._head[j] + self._times.least_forward[j]
        end = self._times.least_backward[j] + self._home[j]
        down = self._down[j + 1]
        forwards = begin + count * send + down + back + end
        backwards = begin + send + down + count * back + end
        self._model.add(self.value >= forwards).only_enforce_if(condition)
        self._model.add(self.value >= backwards).only_enforce_if(condition)

    def _spread_work(self) -> None:
        """Redundant: the devices' time between head and home must hold all layers' work.

        Work is priced by the dual values of the even-load relaxation; without this constraint
        CP-SAT sees no connection between the stages' loads.
        """
        chain = self._d.chain
        dual = chain.load_prices
        prices = [round(PRICE_STEPS * float(x)) for x in dual / dual.max()]
        ticks = [self._d.ticks(chain.forward_s(t) + chain.backward_s(t)) for t in chain.types]
        work = sum(
            min(price * times[layer] for price, times in zip(prices, ticks, strict=True))
            for layer in range(chain.length)
        )
        time = []
        for d, kind in enumerate(self._d.type_of):
            free = self._d.time(f"time of {self._d.devices[d]}")
            holds = [self._d.on[j, d] for j in self._d.stages]
            self._model.add(free <= self.value)
            self._model.add(free == 0).only_enforce_if([~literal for literal in holds])
            for j, literal in enumerate(holds):
                limit = self.value - self._head[j] - self._home[j]
                self._model.add(free <= limit).only_enforce_if(literal)
            time.append(prices[kind] * free)
        self._model.add(sum(time) >= self._d.job.microbatches * work)
