"""Finds the cheapest policy that is good enough for a user's own documents: `blendrag calibrate`."""

from blendrag.calibrate.points import Point
from blendrag.calibrate.search import Calibration, calibrate
from blendrag.calibrate.target import Target

__all__ = ["Calibration", "Point", "Target", "calibrate"]
