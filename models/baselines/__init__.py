"""Drafters that MoA is measured against, trained on the same data and verified by the same target."""
