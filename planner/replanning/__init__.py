"""``replan``: a new plan after machines were lost, slowed or added, which moves little state.

``state`` is what each device holds and what must be moved, ``repair`` and ``recut`` make stages
near the old ones, ``search`` judges them and walks on, ``choice`` takes a plan that is fast and
moves few bytes. :mod:`planner.variants.machine_changes` has the changes of machines.
"""

from planner.replanning.replan import Replanned, replan

__all__ = ["Replanned", "replan"]
