"""The microbatch schedule as a CP-SAT model, a part of it a file."""

from planner.schedule.model.model import ScheduleModel

__all__ = ["ScheduleModel"]
