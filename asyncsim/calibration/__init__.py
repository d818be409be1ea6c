"""From a trace to the cluster that could have made it."""

from asyncsim.calibration.calibrated import Calibration, CalibrationWarning, calibrate, examine

__all__ = ["Calibration", "CalibrationWarning", "calibrate", "examine"]
