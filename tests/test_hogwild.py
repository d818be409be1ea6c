"""Torn reads: against workers that do read one block after the other from a vector that others
write to.
"""

import dataclasses

import numpy as np
import pytest
import simpy
from cases import make_problem
from event_loop import deviation

from asyncsim import Cluster, Gamma, InputError, methods, problems, simulate
from asyncsim.methods import Timing
from asyncsim.replays.replay import Replay, replay
from asyncsim.simulation.delays import delays
from asyncsim.study.cell import meet

RATE, CURVATURE, START = 0.05, np.linspace(0.1, 1.5, 11), np.linspace(-2, 1, 11)


pytestmark = pytest.mark.usefixtures("float64")


def lock_free(workers, blocks, **options):
    """Reads take a third of the time of a gradient."""
    return Cluster(
        workers,
        Gamma(1.0, 0.4),
        service=Gamma(0.3, 0.5),
        protocol="write_then_read",
        discipline="lock_free",
        read_blocks=blocks,
        **options,
    )


def shared_memory(cluster, commits, seed=0):
    """Run Hogwild: a process per worker, one shared vector, no locks; return the vector after each
    commit.
    """
    env, shared, path = simpy.Environment(), START.copy(), [START.copy()]
    compute = delays(cluster.compute_laws, seed, "compute")
    service = delays([cluster.service] * cluster.workers, seed, "service")
    width = -(-len(START) // cluster.read_blocks)
    blocks = [slice(b * width, (b + 1) * width) for b in range(cluster.read_blocks)]
    done = env.event()

    def work(index):
        seen = START.copy()
        while True:
            yield env.timeout(compute(index))
            yield env.timeout(service(index))
            shared[:] -= RATE * CURVATURE * seen
            path.append(shared.copy())
            if len(path) == commits + 1:
                done.succeed()
            duration = service(index)
            for block in blocks:
                yield env.timeout(duration / len(blocks))
                seen[block] = shared[block]

    for index in range(cluster.workers):
        env.process(work(index))
    env.run(done)
    return np.array(path)


def test_a_replay_is_what_workers_do_to_a_shared_vector():
    cluster = lock_free(workers=7, blocks=4)
    trace, stops = simulate(cluster, 500), np.arange(50, 501, 50)
    problem = problems.quadratic(CURVATURE, start=START)
    replayed = Replay(
        trace, methods.hogwild(RATE, blocks=None), problem, precision="float64", stops=stops
    )
    expected = shared_memory(cluster, 500)
    torn = (trace.block_versions()[:, 0] < trace.frame["read_version"]).mean()
    assert torn > 0.1
    for stop in stops.tolist():
        replayed.advance(stop)
        assert deviation(replayed.state.central, expected[stop]) < 1e-10


def test_hogwild_names_the_timing_that_it_needs():
    method = methods.hogwild(blocks=4)
    assert meet(Cluster(7, Gamma(1.0, 0.4), service=Gamma(0.3, 0.5)), method.timing) == lock_free(
        7, 4
    )
    with pytest.raises(
        InputError, match="method = 'hogwild': needs a trace with protocol = 'write_then_read'"
    ):
        replay(simulate(Cluster(7, 1.0), 70), method, make_problem("quadratic"))
    # A method that needs whole visits gets whole reads.
    exchanging = meet(lock_free(7, 4), Timing(protocol="exchange"))
    assert exchanging == dataclasses.replace(lock_free(7, 1), protocol="exchange")
