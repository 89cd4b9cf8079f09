"""How many calls of conversations a node answers in time, with the prefix cache and without."""
