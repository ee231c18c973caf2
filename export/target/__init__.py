"""Make the copy of a target that a CPU serves."""
