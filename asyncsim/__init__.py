"""A discrete-event simulator for the dynamics of asynchronous SGD, with real gradients.

    Cluster --simulate--> Trace --replay(Method, Problem)--> Run

Names are imported when first used: the cluster side never loads JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    import asyncsim.calibration as calibration
    import asyncsim.methods as methods
    import asyncsim.plots as plots
    import asyncsim.prediction as prediction
    import asyncsim.problems as problems
    import asyncsim.real as real
    import asyncsim.study as study
    import asyncsim.theory as theory
    from asyncsim.calibration import CalibrationWarning, calibrate
    from asyncsim.cluster import Cluster, HeterogeneityWarning
    from asyncsim.ensemble import replay_ensemble
    from asyncsim.errors import InputError
    from asyncsim.laws import (
        Constant,
        Empirical,
        Exponential,
        Gamma,
        Law,
        LogNormal,
        Mixture,
        Pareto,
        Uniform,
        Weibull,
    )
    from asyncsim.policy import (
        Policy,
        asynchronous,
        barrier,
        bounded_staleness,
        buffered,
        cancel_stale,
        discard_stale,
        first_of,
        rounds,
    )
    from asyncsim.prescription import prescribed
    from asyncsim.run import Run
    from asyncsim.simulation import simulate
    from asyncsim.trace import Trace
    from asyncsim.visits import recorded
    from asyncsim.wave_replay import replay
    from asyncsim.windows import proportional_windows

__all__ = [
    "CalibrationWarning",
    "Cluster",
    "Constant",
    "Empirical",
    "Exponential",
    "Gamma",
    "HeterogeneityWarning",
    "InputError",
    "Law",
    "LogNormal",
    "Mixture",
    "Pareto",
    "Policy",
    "Run",
    "Trace",
    "Uniform",
    "Weibull",
    "asynchronous",
    "barrier",
    "bounded_staleness",
    "buffered",
    "calibrate",
    "calibration",
    "cancel_stale",
    "discard_stale",
    "first_of",
    "methods",
    "plots",
    "prediction",
    "prescribed",
    "problems",
    "proportional_windows",
    "real",
    "recorded",
    "replay",
    "replay_ensemble",
    "rounds",
    "simulate",
    "study",
    "theory",
]

_MODULES = ("calibration", "methods", "plots", "prediction", "problems", "real", "study", "theory")
_HOME = {
    "CalibrationWarning": "calibration",
    "Cluster": "cluster",
    "HeterogeneityWarning": "cluster",
    "InputError": "errors",
    "Policy": "policy",
    "Run": "run",
    "Trace": "trace",
    "asynchronous": "policy",
    "barrier": "policy",
    "bounded_staleness": "policy",
    "buffered": "policy",
    "calibrate": "calibration",
    "cancel_stale": "policy",
    "discard_stale": "policy",
    "first_of": "policy",
    "prescribed": "prescription",
    "proportional_windows": "windows",
    "recorded": "visits",
    "replay": "wave_replay",
    "replay_ensemble": "ensemble",
    "rounds": "policy",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"asyncsim.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'asyncsim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asyncsim.{_HOME.get(name, 'laws')}"), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
