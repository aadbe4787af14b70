"""Set-up of a run from its command line, checked before ranks talk to each other."""
