"""Published runs of other systems, predicted from their own profiles."""
