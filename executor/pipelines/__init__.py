"""Pipelines that train side by side, each a world of its own, and what they exchange."""
