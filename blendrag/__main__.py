"""`python -m blendrag` is the `blendrag` command."""

from blendrag.cli.run import run

if __name__ == "__main__":
    run()
