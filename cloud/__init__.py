"""The verifier: runs the target over draft trees of many sessions at once (`python -m cloud.verifier`)."""
