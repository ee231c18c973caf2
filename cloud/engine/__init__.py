"""Sessions, their keys and values, steps and verdicts: all of the verifier that knows no socket."""
