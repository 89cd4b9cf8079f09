"""Nodes on machines of Ray, as far as that needs no Ray."""
