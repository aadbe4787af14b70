"""The problem of dnn-partitioning: place a graph's nodes so that the largest load is least."""
