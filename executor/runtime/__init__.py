"""One rank's program: computations, messages and reductions of an iteration, and their times."""
