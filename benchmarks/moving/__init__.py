"""Bytes of moves between layouts."""
