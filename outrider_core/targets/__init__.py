"""Targets without torch: read a model's files, lower them to one ONNX graph, run it.

A *target* here is any complete causal language model of a supported family: what the verifier serves, what a laptop
runs beside its drafter, and what a device keeps as its understudy.
"""
