"""The connection to a verifier."""
