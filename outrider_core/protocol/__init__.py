"""The contract both ends agree on: messages, token trees, keyed noise, sampling, feature rows.

Pure: numpy and msgspec only; no torch, no I/O, no clock.
"""
