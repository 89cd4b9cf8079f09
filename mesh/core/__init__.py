"""The two decision machines, which share no import: see README.md for what is decided where."""
