"""The cost model: seconds and bytes of layers, stages, transfers and collectives on devices."""
