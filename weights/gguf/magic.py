"""How a GGUF file is known from others. Apart from the reader, because names are resolved without
torch.
"""

from pathlib import Path

MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file does."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
