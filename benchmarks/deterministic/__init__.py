"""Plans in deterministic mode, to compare before and after a change of the code."""
