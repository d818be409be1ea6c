"""Whether a method can be replayed on a trace and a problem."""

from typing import Any

import jax

from asyncsim.clusters.policy import Policy
from asyncsim.errors import InputError, require_count, require_fraction
from asyncsim.methods.method import Method
from asyncsim.problems.problem import Problem
from asyncsim.replays.method_check import check_method
from asyncsim.traces.trace import Trace
from asyncsim.tracing import require_threads


def check_replay(trace: Any, method: Any, problem: Any, diagnose_every: int, proxy_momentum: float) -> tuple[str, ...]:
    """Return the method's own diagnostics; raise InputError unless it can be replayed on this trace and problem."""
    require_kinds(trace, method, problem)
    require_count("diagnose_every", diagnose_every, minimum=0)
    require_fraction("proxy_momentum", proxy_momentum)
    diagnostics = check_method(method, jax.eval_shape(problem.init, jax.random.key(0)))
    _check_timing(method, trace)
    _check_outcomes(trace)
    return diagnostics


def require_kinds(trace: Any, method: Any, problem: Any) -> None:
    """Raise InputError unless each is what its name says, and JAX can compute in this process."""
    require_threads()
    for name, value, kind in (("trace", trace, Trace), ("method", method, Method), ("problem", problem, Problem)):
        if not isinstance(value, kind):
            made = {Trace: "simulate(...)", Method: "methods.gem()", Problem: "problems.digits()"}[kind]
            hint = "; call it to make one" if callable(value) else f", which {made} returns"
            raise InputError(f"{name}: is a {type(value).__name__}, must be a {kind.__name__}{hint}")


def _check_timing(method: Method, trace: Trace) -> None:
    for name, needed in method.timing._asdict().items():
        if name == "message_size":  # its time is the trace's, whatever it is
            continue
        has = getattr(trace, name)
        if name == "window" and trace.windows_differ:
            has = tuple(sorted(set(trace.frame["local_steps"].tolist())))
        if needed is None or has == needed:
            continue
        how = f"asyncsim.{needed}" if name == "policy" else repr(needed)
        raise InputError(
            f"method = {method.name!r}: needs a trace with {name} = {_said(needed)}, this one has {_said(has)}; "
            f"simulate one with Cluster({name}={how})"
        )


def _said(value: Any) -> str:
    return str(value) if isinstance(value, Policy) else repr(value)


def _check_outcomes(trace: Trace) -> None:
    if not len(trace.taken_up):
        raise InputError("trace: the server took up none of its messages, so that there is nothing to replay")
    if not trace.frame["local_steps"].between(1, trace.window).all():
        raise InputError(f"trace: local_steps must be from 1 to its window, {trace.window}, in every row")
    if trace.windows_differ:
        _check_windows(trace)


def _check_windows(trace: Trace) -> None:
    """Raise InputError unless each worker's jobs are alike: by their local steps its minibatches are counted."""
    steps = trace.frame.groupby("worker")["local_steps"].agg(["min", "max"])
    differing = steps[steps["min"] < steps["max"]]
    if len(differing):
        worker, least, most = next(differing.itertuples())
        raise InputError(
            f"trace: worker {worker} has jobs of {least} to {most} local_steps, so that minibatches would be drawn "
            "twice or left out; give all jobs of a worker the same local_steps"
        )
