"""Data-parallel pipelines that come and go: their setup, exchange of weights, and checkpoints."""
