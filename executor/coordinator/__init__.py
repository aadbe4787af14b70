"""Tells pipelines who averages with whom and which work unit is next.

The decisions are a pure state machine (:mod:`executor.coordinator.state`). Around it are a server
of one thread, a client on each rank, and the processes that watch ranks under one torchrun.
"""
