"""Frozen Transformers that give the hidden states of every position at every depth."""

from vecroute.encoders.text import Batch, TextEncoder, Tokenized, Tokens

__all__ = ["Batch", "TextEncoder", "Tokenized", "Tokens"]
