"""What only a GPU can show of the executor, in the order of what it is worth to know."""
