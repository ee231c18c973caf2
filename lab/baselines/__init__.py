"""Baselines for MoA: other drafters, trained on the same data and verified by the same target, and multi-candidate
speculative decoding (MCSD) with its relatives, on probability arrays.
"""
