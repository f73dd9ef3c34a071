"""Checkpoints of sharded modules: Hugging Face folders, safetensors files, DCP folders, full state dicts."""

from .loading import Loaded, load
from .saving import Pending, save, save_pretrained
from .snapshots import Snapshots, resumed, snapshot

__all__ = ["Loaded", "Pending", "Snapshots", "load", "resumed", "save", "save_pretrained", "snapshot"]
