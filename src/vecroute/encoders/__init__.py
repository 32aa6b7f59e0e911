"""Frozen Transformers that return the hidden states of every position at every depth."""

from vecroute.encoders.text import Batch, TextEncoder, Tokenized, Tokens
from vecroute.encoders.vision import Patches, VisionEncoder

__all__ = ["Batch", "Patches", "TextEncoder", "Tokenized", "Tokens", "VisionEncoder"]
