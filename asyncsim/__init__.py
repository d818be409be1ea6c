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
    from asyncsim.clusters.cluster import Cluster, HeterogeneityWarning, proportional_windows
    from asyncsim.clusters.laws import (
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
    from asyncsim.clusters.policy import (
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
    from asyncsim.errors import InputError
    from asyncsim.replays.ensemble import replay_ensemble
    from asyncsim.replays.replay import replay
    from asyncsim.replays.run import Run
    from asyncsim.simulation.simulate import simulate
    from asyncsim.traces.prescription import prescribed
    from asyncsim.traces.trace import Trace
    from asyncsim.traces.visits import recorded

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
    "Cluster": "clusters.cluster",
    "HeterogeneityWarning": "clusters.cluster",
    "InputError": "errors",
    "Policy": "clusters.policy",
    "Run": "replays.run",
    "Trace": "traces.trace",
    "asynchronous": "clusters.policy",
    "barrier": "clusters.policy",
    "bounded_staleness": "clusters.policy",
    "buffered": "clusters.policy",
    "calibrate": "calibration",
    "cancel_stale": "clusters.policy",
    "discard_stale": "clusters.policy",
    "first_of": "clusters.policy",
    "prescribed": "traces.prescription",
    "proportional_windows": "clusters.cluster",
    "recorded": "traces.visits",
    "replay": "replays.replay",
    "replay_ensemble": "replays.ensemble",
    "rounds": "clusters.policy",
    "simulate": "simulation.simulate",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"asyncsim.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'asyncsim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asyncsim.{_HOME.get(name, 'clusters.laws')}"), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
