"""Sessions, their keys and values, steps and verdicts: the parts of the verifier without sockets."""
