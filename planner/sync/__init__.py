"""Gradient synchronisation between pipelines: options, groups, simulation, and the choice.

No torch here: the executor runs what this room decides.
"""
