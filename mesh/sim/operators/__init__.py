"""Operators under a virtual clock: tables that ship with mesh, and the execution of plans."""
