"""Ports (clock, engine, link, journal) and the one loop that runs a core live and simulated."""
