"""Drafters: the target's answers, training on them, and the authors' checkpoints."""
