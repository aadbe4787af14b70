"""Questions about a plan: why it is not faster, what would change it, how it compares."""
