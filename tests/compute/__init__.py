"""Profiles: made, scaled, corrected, read."""
