"""Changes of a deployment under load."""
