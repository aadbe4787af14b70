"""Microbatches of several lengths, planned and run as they are, beside padding to the longest."""
