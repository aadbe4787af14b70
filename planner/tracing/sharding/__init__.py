"""How a training step splits over a tensor-parallel group: found in its exported operations.

``split_step`` decides which dimensions of which values are split; ``localise`` makes the graph that
each rank runs; ``record_of`` adds up what is divided, layer by layer.
"""
