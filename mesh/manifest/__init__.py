"""Manifests: `model.yaml`, read and written. The command line and the page share it."""
