"""Text to token ids and back."""

from engine.text.detokenizer import ByteStream, FallbackStream
from engine.text.stop import StopScanner
from engine.text.tokenizer import Tokenizer

__all__ = [
    "ByteStream",
    "FallbackStream",
    "StopScanner",
    "Tokenizer",
]
