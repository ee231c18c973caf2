"""Many replicas of the verifier behind one address, through Ray Serve. Ray is imported late, in functions."""
