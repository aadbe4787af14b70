"""The shape of the code as it is: sizes, imports, names, and how far a microbatch travels."""
