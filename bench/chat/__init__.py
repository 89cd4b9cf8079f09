"""Conversations with a shared system prompt: what a turn costs that begins like the one before."""
