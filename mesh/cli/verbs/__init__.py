"""A file a verb: what `mesh VERB` takes, and what it does with it."""
