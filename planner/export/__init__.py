"""Plans in the words of the tools that people already train with."""
