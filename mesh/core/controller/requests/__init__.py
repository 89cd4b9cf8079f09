"""Requests. Here is decided who gets a place, where and in which order, who waits and for how long,
who is moved, and how each one ends, exactly once.
"""
