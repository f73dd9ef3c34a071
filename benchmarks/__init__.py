"""Measurements over many architectures: `make models` writes docs/models.md."""
