"""`python -m blendrag.bench`."""

import sys

from blendrag.bench.cli import app
from blendrag.errors import BlendError

if __name__ == "__main__":
    try:
        app()
    except BlendError as error:
        sys.exit(f"blendrag: {error}")
