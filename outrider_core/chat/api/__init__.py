"""The OpenAI-style endpoints of verifier and device: requests, replies, streams and errors."""
