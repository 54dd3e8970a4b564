"""kvfold inside stock transformers: the only room that imports transformers."""

from kvfold.hf.attach import attach
from kvfold.hf.cache import Cache

__all__ = ["Cache", "attach"]
