"""Attention by tiled torch operators: what runs where no kernel can be compiled."""

from attnloom.backends.tiled.backend import TiledBackend

__all__ = ["TiledBackend"]
