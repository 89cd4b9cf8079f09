"""`mesh fleet` on a real Ray. It wants namespaces of its own: `make test-ray`."""
