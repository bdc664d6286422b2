"""`blendrag demo`: questions to real documents, answered by a plain full prefill and by blending, side by side."""

from blendrag.demo.run import DemoSettings, run_demo

__all__ = ["DemoSettings", "run_demo"]
