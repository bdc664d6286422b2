"""Benchmarks: `python -m blendrag.bench --help`."""
