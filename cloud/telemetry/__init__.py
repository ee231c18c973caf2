"""Metrics, logs, traces and progress."""
