"""Watches over the quality of blended answers while an engine serves: how good they are, and what follows from it."""

from blendrag.guard.monitor import Monitor, Quality
from blendrag.guard.settings import QualityGuard

__all__ = ["Monitor", "Quality", "QualityGuard"]
