"""Domino drafts for speculative decoding: train them, serve them, prove that both agree."""

__version__ = "0.1.0"
