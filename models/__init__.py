"""Torch networks: the target (full model) and the halves of the Mixture-of-Attentions drafter.

Import the module you need (`models.target`, `models.moa`); this package itself loads nothing heavy.
"""
