"""A discrete-event simulator for the dynamics of asynchronous SGD, with real gradients.

    Cluster --simulate--> Trace --replay(Method, Problem)--> Run

Names are imported when they are first used: the command line then answers at once, also to Ctrl-C.
"""

import importlib
from typing import TYPE_CHECKING, Any

from asyncsim.base import hooks

__version__ = "0.1.0.dev0"

__all__ = [
    "CalibrationWarning",
    "Cluster",
    "Constant",
    "Empirical",
    "Exponential",
    "Gamma",
    "HalfNormal",
    "HeterogeneityWarning",
    "InputError",
    "Law",
    "LogNormal",
    "Mixture",
    "Pareto",
    "Policy",
    "Rollouts",
    "Run",
    "SlowLinkWarning",
    "Trace",
    "Uniform",
    "Weibull",
    "aggregation",
    "asynchronous",
    "attacks",
    "barrier",
    "bounded_staleness",
    "buckets",
    "buffered",
    "calibrate",
    "calibration",
    "cancel_stale",
    "discard",
    "discard_stale",
    "drop_oldest",
    "failures",
    "first_of",
    "handshake",
    "keep",
    "methods",
    "neighbours",
    "overlap",
    "pace",
    "per_worker",
    "pipeline",
    "plots",
    "prediction",
    "prescribed",
    "problems",
    "proportional_windows",
    "real",
    "recorded",
    "recorders",
    "replay",
    "replay_ensemble",
    "rounds",
    "runs",
    "simulate",
    "study",
    "theory",
    "topologies",
    "trials",
]

#: Where the names are that are imported when first used: the package of a module, or the module of
#: a name.
_HOME = {
    "aggregation": "byzantine",
    "attacks": "byzantine",
    "failures": "clusters",
    "plots": "drawing",
    "prediction": "calibration",
    "recorders": "replays",
    "topologies": "clusters",
    **dict.fromkeys(("calibration", "methods", "problems", "real", "runs", "study", "theory"), ""),
    **dict.fromkeys(
        (
            "Constant",
            "Empirical",
            "Exponential",
            "Gamma",
            "HalfNormal",
            "Law",
            "LogNormal",
            "Mixture",
            "Pareto",
            "Uniform",
            "Weibull",
        ),
        "clusters.laws",
    ),
    **dict.fromkeys(
        (
            "Policy",
            "asynchronous",
            "barrier",
            "bounded_staleness",
            "buckets",
            "buffered",
            "cancel_stale",
            "discard_stale",
            "first_of",
            "handshake",
            "neighbours",
            "overlap",
            "rounds",
            "trials",
        ),
        "clusters.policy",
    ),
    "Cluster": "clusters.cluster",
    "SlowLinkWarning": "clusters.network",
    **dict.fromkeys(("Rollouts", "discard", "drop_oldest", "keep", "pace"), "clusters.rollouts"),
    **dict.fromkeys(("HeterogeneityWarning", "proportional_windows"), "clusters.workers"),
    "InputError": "base.errors",
    "per_worker": "clusters.network",
    "CalibrationWarning": "calibration",
    "Run": "replays.run",
    "Trace": "traces.trace",
    "calibrate": "calibration",
    **dict.fromkeys(("pipeline", "prescribed"), "traces.prescription"),
    "recorded": "traces.visits",
    "replay": "replays.replay",
    "replay_ensemble": "replays.ensemble",
    "simulate": "simulation.simulate",
}

hooks.plots = lambda: importlib.import_module("asyncsim.drawing.plots")
hooks.on_a_page = lambda folder: importlib.import_module("asyncsim.pages.page").on_a_page(folder)

if TYPE_CHECKING:
    from asyncsim import calibration, methods, problems, real, runs, study, theory
    from asyncsim.base.errors import InputError
    from asyncsim.byzantine import aggregation, attacks
    from asyncsim.calibration import CalibrationWarning, calibrate, prediction
    from asyncsim.clusters import failures, topologies
    from asyncsim.clusters.cluster import Cluster
    from asyncsim.clusters.laws import (
        Constant,
        Empirical,
        Exponential,
        Gamma,
        HalfNormal,
        Law,
        LogNormal,
        Mixture,
        Pareto,
        Uniform,
        Weibull,
    )
    from asyncsim.clusters.network import SlowLinkWarning, per_worker
    from asyncsim.clusters.policy import (
        Policy,
        asynchronous,
        barrier,
        bounded_staleness,
        buckets,
        buffered,
        cancel_stale,
        discard_stale,
        first_of,
        handshake,
        neighbours,
        overlap,
        rounds,
        trials,
    )
    from asyncsim.clusters.rollouts import Rollouts, discard, drop_oldest, keep, pace
    from asyncsim.clusters.workers import HeterogeneityWarning, proportional_windows
    from asyncsim.drawing import plots
    from asyncsim.replays import recorders
    from asyncsim.replays.ensemble import replay_ensemble
    from asyncsim.replays.replay import replay
    from asyncsim.replays.run import Run
    from asyncsim.simulation.simulate import simulate
    from asyncsim.traces.prescription import pipeline, prescribed
    from asyncsim.traces.trace import Trace
    from asyncsim.traces.visits import recorded
else:  # type checkers know that there is no other name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'asyncsim' has no attribute {name!r}")
        home = importlib.import_module(f"asyncsim.{_HOME[name]}".rstrip("."))
        return vars(home).get(name) or importlib.import_module(f"{home.__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
