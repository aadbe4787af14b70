"""Synchronisation between pipelines in virtual time, with real training of a small problem."""
