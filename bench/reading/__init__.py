"""How fast weights come from a file into memory."""
