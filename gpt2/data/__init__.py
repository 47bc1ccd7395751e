"""Corpora as token ids, and the batches made of them. Imports no torch."""

from gpt2.data.batches import Batches, open_corpus
from gpt2.files.cache import DataError

__all__ = ["Batches", "DataError", "open_corpus"]
