"""The artifacts people read, write and exchange: layer graph, cluster, job, problem and plan."""
