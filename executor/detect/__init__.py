"""``torchrun … -m executor.detect``: a cluster file from what its links do.

``options`` reads the command line, ``turns`` decides who talks when and passes the turn on,
``probe`` times messages and all-reduces, ``run`` leads through all of it, and ``report`` writes
and prints the results. The cluster is concluded from the figures by :mod:`planner.topology`.
"""
