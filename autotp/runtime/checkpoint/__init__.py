"""Checkpoints of sharded modules: Hugging Face folders, safetensors files, DCP folders, full state dicts."""

from .loading import Loaded, load
from .saving import Pending, save

__all__ = ["Loaded", "Pending", "load", "save"]
