"""Forked children of a process that used JAX."""

import subprocess
import sys

SCRIPT = """
import multiprocessing, sys, warnings
import asyncsim

warnings.filterwarnings("ignore", category=RuntimeWarning)  # JAX's own, of any fork
trace = asyncsim.simulate(asyncsim.Cluster(workers=3, compute=1.0), commits=9, seed=0)
method, problem = asyncsim.methods.sgd(), asyncsim.problems.quadratic([1.0, 2.0])

def child(act):
    try:
        act()
        print("computed", flush=True)
    except asyncsim.InputError as error:
        print("spawn" in str(error), flush=True)

def run(act):
    process = multiprocessing.get_context("fork").Process(target=child, args=(act,))
    process.start()
    process.join()

def replay():
    asyncsim.replay(trace, asyncsim.methods.downpour(), problem)

run(replay)
repr(problem)
run(replay)
run(lambda: asyncsim.problems.custom(lambda key: 1.0, lambda params, batch, key: params))
"""


def test_a_forked_child_names_spawn_at_once():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["computed", "True", "True"], done.stdout + done.stderr
