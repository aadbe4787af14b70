"""Memory of stages: what they hold, what to recompute, and whether anything fits at all.

``interval_memory`` has the memory of all intervals of layers at once; ``recompute`` chooses the
layers of a stage to recompute (with ``knapsack``), ``recompute_variants`` those of a partition, for
the microbatches in flight that ``steady_state`` finds best; ``division`` divides the layers into
stages that fit their devices.
"""
