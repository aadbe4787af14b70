"""``torchrun … -m executor.measure_links``: a cluster file from what its links do.

``options`` reads the command line, ``turns`` decides who talks when, ``probe`` times messages and
all-reduces, ``turn_taking`` lets one turn follow another, ``run`` leads through all of it, and
``report`` tells what came of it. What is concluded from the figures is :mod:`planner.wiring`'s.
"""
