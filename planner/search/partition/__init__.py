"""Stage partition, device mapping, replication and recomputation.

- ``chain``: the model as a row of layers; ``intervals``: its figures for all intervals of layers,
  in matrices; ``stash``: what a stage keeps of a microbatch; ``symmetry``: devices that can be
  exchanged.
- ``bounds``: how fast a given partition, or any plan, can be at best.
- ``relaxations``: tighter bounds on every plan, and partitions that follow from them.
- ``memory``: what fits, and what to recompute.
- ``dynamic_programs``: the core of all programs, and partitions along an order of the devices.
- ``local_search``: the loop of all local searches, and their neighbourhood.
- ``cp_sat``: the CP-SAT model.
- ``baselines``: published planners to compare with.

``candidates`` yields partitions that need no search; ``optimiser`` runs the rest in turns.
"""
