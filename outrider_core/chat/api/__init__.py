"""What the verifier's and the device's OpenAI-style endpoints share: requests, replies, streams and errors."""
