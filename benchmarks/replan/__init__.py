"""Replanning after a change of the machines, against planning again."""
