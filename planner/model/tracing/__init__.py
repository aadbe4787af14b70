"""The old home of the sharding of layers; the rest is in :mod:`planner.tracing`."""
