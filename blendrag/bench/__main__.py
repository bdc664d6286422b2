"""`python -m blendrag.bench`."""

import sys

from blendrag.bench.cli import app
from blendrag.errors import BlendError

try:
    app()
except BlendError as error:
    sys.exit(f"blendrag: {error}")
