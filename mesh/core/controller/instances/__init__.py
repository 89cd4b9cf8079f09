"""Instances. Here is decided on which node one starts, how much KV cache it has, whether it can
compute a further request in time, and when it is parked, drained or unloaded.
"""
