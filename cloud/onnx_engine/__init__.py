"""The target as an ONNX graph on a CPU, exact to the last bit; no torch."""
