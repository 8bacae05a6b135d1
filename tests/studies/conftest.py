"""The tokenizer that the pocket studies train, made once; `make studies-test` runs this folder."""

from tests.tools.conftest import trained_tokenizer

__all__ = ["trained_tokenizer"]
