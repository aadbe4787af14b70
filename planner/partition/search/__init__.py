"""Searches over partitions: ``optimise`` combines them, ``best`` adds the exact model's proof."""
