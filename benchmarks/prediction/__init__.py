"""Predicted against measured iteration times and memory."""
