"""Public profiles and instances read into layer graphs, clusters and jobs: `pipeplan import`."""
