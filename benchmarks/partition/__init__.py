"""Stage partition and device mapping against bounds."""
