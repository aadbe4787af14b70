"""What only a GPU can show of the executor, in order of worth: ``run.sh`` runs it, see its head."""
