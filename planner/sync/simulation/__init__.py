"""Simulation of synchronisation strategies in virtual time, with real training of a small problem.

:func:`from_plan` makes the :class:`World` of a plan, :func:`calibrated` fits one to a measured
trace; :func:`compare_syncs` runs strategies in a :class:`Scenario`.
"""
