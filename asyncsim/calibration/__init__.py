"""Calibration: fit a cluster to a trace."""

from asyncsim.calibration.calibrated import Calibration, CalibrationWarning, calibrate, examine

__all__ = ["Calibration", "CalibrationWarning", "calibrate", "examine"]
