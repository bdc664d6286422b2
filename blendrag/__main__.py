"""`python -m blendrag` is the `blendrag` command."""

from blendrag.cli import app

if __name__ == "__main__":
    app(prog_name="blendrag")
