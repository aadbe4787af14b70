"""Which pipelines average with which: pure state machines, one file a way to decide."""
