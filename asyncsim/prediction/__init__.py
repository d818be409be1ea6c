"""How well a cluster calibrated on one recording predicts another: the later half of the same, or other workers."""

from asyncsim.prediction.predicted import Prediction, extrapolate, predict

__all__ = ["Prediction", "extrapolate", "predict"]
