"""Mutation testing: the share of small faults put into a room's code that its tests notice."""
