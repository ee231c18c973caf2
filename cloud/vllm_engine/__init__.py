"""The target on vLLM: its loader, kernels and paged KV cache, under this verifier's sessions, trees and draws."""
