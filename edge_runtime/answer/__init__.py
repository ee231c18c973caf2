"""Carries a session's actions out: threads of drafter and understudy, the link, what a user sees."""
