"""The target in PyTorch: on GPUs, on several of them, or on a CPU in a float format."""
