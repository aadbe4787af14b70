"""Relaxations of the cluster: each bounds every plan from below.

``type_relaxation`` takes devices of a type as alike, with the best links of all; on large clusters
``surrogate_relaxation`` gives devices prices and has one budget instead, and ``rounding`` makes
partitions of its solutions; ``class_relaxation`` takes only interchangeable devices as alike and
has all links as they are. The first two are state spaces for
:mod:`planner.search.partition.dynamic_programs.core`, the last has a pass of its own over all
states of a cut at once (``class_pass``); ``…_figures`` says what stages cost.

``column_relaxation`` is for several stages a device: what each device may hold at most, by a
knapsack (``column_knapsack``) or all pairs of stages (``column_pairs``), and prices of the layers
that all devices together cannot earn.
"""
