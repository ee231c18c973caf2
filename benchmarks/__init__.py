"""Measurements: the demo and the acceptance-length benchmark. Every one writes JSON and prints a table."""
