"""Stage partition, device mapping, replication and recomputation.

``chain`` is the model as a row of layers, ``intervals`` its figures in matrices. ``bounds`` says
how good a partition can be, ``memory`` what fits, ``ordered`` finds partitions along an order of
the devices, ``planners`` are the classic methods, ``search`` improves what these find, ``exact``
is the CP-SAT model; ``loads`` solves the placement problem of dnn-partitioning.
"""
