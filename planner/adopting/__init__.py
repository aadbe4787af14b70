"""Plans of what people already run: their stages and their schedule, in place of a search.

Hands out :func:`planner.adopting.adopt.adopt`, and :mod:`planner.adopting.overflow` for plans that
do not fit into memory.
"""
