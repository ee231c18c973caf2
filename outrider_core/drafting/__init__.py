"""Drafting on a device: bundle, engines, the drafter and its trees. Never imports torch."""
