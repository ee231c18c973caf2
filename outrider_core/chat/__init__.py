"""Conversations: templates and tokens, calls of functions, grammars, and the OpenAI-style endpoints."""
