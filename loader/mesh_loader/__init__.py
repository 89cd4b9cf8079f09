"""The model store: models are fetched, imported, prepared and kept."""
