"""Files: reading, checking, writing, digests, formats."""
