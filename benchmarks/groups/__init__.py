"""Plans of tensor-parallel groups against the best even layout, and how near their bounds are."""
