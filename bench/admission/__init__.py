"""How long the controller core takes to decide where a request goes: `make bench-admission`."""
