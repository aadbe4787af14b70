"""Why an iteration takes as long as it does: ``explain`` makes an ``Explanation`` of a timeline.

The critical path and its shares by cause, every device's time, lower bounds of devices and links,
and whether memory binds. ``planner.report.explanation`` puts it into words.
"""

from planner.analysis.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
