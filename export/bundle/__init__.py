"""Bundles for devices: quantised, lowered, checked and measured."""
