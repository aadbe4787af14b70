"""Stages with more replicas than microbatches: some replicas run nothing."""

from builders import boundary, graph, layer, pipeline, star

from planner.search.budget import Clock, Settings
from planner.search.schedule.heuristic import Schedule, best_heuristic_schedule
from planner.search.schedule.solve import ScheduleTask, improve_schedule

REPLICAS = 28
"""So many that the model does not choose the replicas of microbatches itself."""


def test_a_replica_without_microbatches_is_scheduled() -> None:
    two_stages = graph([layer("a"), layer("b")], [boundary("a", "b", bytes_=0)])
    names = [f"d{index}" for index in range(REPLICAS + 1)]
    placed = pipeline(two_stages, star(REPLICAS + 1), [("a", names[:-1]), ("b", names[-1:])])
    start = best_heuristic_schedule(placed)
    assert isinstance(start, Schedule)
    settings, clock = Settings(deterministic=True), Clock(1, deterministic=True)
    improved = improve_schedule(placed, start, ScheduleTask(settings, clock), 1)
    # Forward of a (1 s) on two replicas at once, both microbatches through b (1 s and 2 s each),
    # backward of a (2 s) for the last one.
    assert improved.iteration_time_s == 1 + 2 * (1 + 2) + 2
