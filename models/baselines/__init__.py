"""Baselines for the drafter: multi-candidate speculative decoding and its relatives, on probability arrays."""
