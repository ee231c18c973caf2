"""Carry out a session's actions: threads of drafter and understudy, the link, the display."""
