"""Replays of traces with crashes and outages against the loop over their events, and what recorders see of them."""

import jax
import numpy as np
import pytest
from event_loop import forced_deviation

from asyncsim import Cluster, failures, methods, problems, recorders, simulate
from asyncsim.replays.replay import Replay

CRASH = failures.crash("exponential(12)", "exponential(4)", detect=1.0)
OUTAGE = failures.outage("exponential(15)", 2.0, checkpoint_every=7, checkpoint_time=0.2)
LOSS = failures.loss(0.1, timeout=2.0, resend=False)
TIMES = {"compute": "gamma(mean=1, cv=0.5)", "service": 0.02, "latency": 0.05}


def trace_of(commits=300, seed=1, workers=5, **options):
    return simulate(Cluster(workers, **{**TIMES, **options}), commits, seed)


EVERYTHING = [CRASH, OUTAGE, LOSS]
CASES = [
    ("gem", {}, {}),
    ("downpour", {}, {"policy": "barrier()"}),
    ("aeasgd", {}, {}),
    ("fedbuff", {"policy": "buffered(3)"}, {"policy": "buffered(3)"}),
    ("ringleader", {}, {}),
    ("lsgd", {"groups": 2}, {}),
    ("averaging", {}, {"policy": "barrier()", "window": 2}),
    ("downpour", {}, {"protocol": "write_then_read"}),
    ("gem", {}, {"protocol": "read_then_write", "exclusive": False}),
    ("gem", {}, {"protocol": "read_then_write"}),
    ("dana_zero", {}, {}),
    ("downpour", {}, {"policy": "rounds"}),
    ("adag", {"optimizer": "adam"}, {"window": 3}),
]


@pytest.mark.parametrize("form", ["batch", "single", "dispatched"])
@pytest.mark.parametrize(("name", "arguments", "options"), CASES, ids=[f"{one[0]}-{i}" for i, one in enumerate(CASES)])
def test_replays_equal_the_loop_over_events(name, arguments, options, form, request):
    if form != "batch" and name not in ("gem", "aeasgd"):
        pytest.skip("one method of each kind")
    if arguments.get("optimizer"):
        import optax

        arguments = {"optimizer": optax.adam(0.01)}
    trace = trace_of(failures=EVERYTHING, **options)
    assert {"crash", "loss"} <= set(trace.frame["failed_by"]) and trace.accepted.frame["restores"].sum() > 3
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard" if "optimizer" in arguments else "strict"):
        method, problem = getattr(methods, name)(**arguments), problems.quadratic(curvature=[0.1, 0.4, 1.0])
        stops = np.array(range(50, len(trace.accepted), 50))
        run = Replay(trace, method, problem, precision="float64", stops=stops, form=form, record=[recorders.energy()])
        deviations = forced_deviation(run, 50)
    assert max(deviations.values()) < 1e-12, deviations
