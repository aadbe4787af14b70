"""Memory of stages: what they keep, what to recompute, and whether anything fits at all."""
