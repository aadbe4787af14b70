"""Measured runs: timelines of operations and messages, synchronisation traces, and their files."""
