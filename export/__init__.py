"""`python -m export`: train a drafter, write a bundle, and report the result."""
