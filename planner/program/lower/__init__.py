"""Passes that make a program of placed stages, one for each feature, and only it knows that."""
