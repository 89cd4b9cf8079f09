"""Answers of the demo model that keep to JSON schemas: are they valid, and what does it cost."""
