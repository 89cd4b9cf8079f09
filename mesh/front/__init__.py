"""A front: clients' calls of every protocol, before several cells."""
