"""The node core. Here is decided which instance computes next and how much, what an idle node times
or warms up, and what the controller is told.
"""
