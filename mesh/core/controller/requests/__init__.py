"""Requests. Here is decided who is admitted, where and in which order, who waits and for how long,
who is moved, and how each one ends, exactly once.
"""
