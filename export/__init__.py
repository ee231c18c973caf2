"""`python -m export`: train a drafter, write a bundle, and report what came out."""
