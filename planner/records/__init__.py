"""Files: reading, checking, writing, digests, formats and migrations."""
