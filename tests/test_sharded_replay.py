"""Replays of several servers: which methods they suit, and the order of jobs and parts.

Their numbers are a part of `test_replay_numbers`.
"""

import functools

import jax
import numpy as np
import pytest
from event_loop import SAME, Side, deviation
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shards import sharded

from asyncsim import attacks, methods, simulate
from asyncsim.methods import Visit
from asyncsim.replays.attacked import under_attack
from asyncsim.replays.parts import find_jobs, trace_of_shard
from asyncsim.replays.plan import method_key, visit_key
from asyncsim.replays.waves import find_waves, separate_reads

#: Methods that parts of a vector do not suit: matrices; delays, which a replay of several servers
#: does not state; and messages with a count for each fragment.
WHOLE = ("ringmaster_lmo", "weight_prediction", "decoupled_diloco")
NAMED = {
    name: make
    for name, make in methods.METHODS.items()
    if name not in WHOLE and not (make().mix or make().meet)
}
RULES = ["trimmed_mean(f=1)", "geometric_median()"]
VARIANTS = {
    **{f"robust {rule}": functools.partial(methods.robust, rule) for rule in RULES},
    "gem, paper": lambda: methods.gem(variant="paper"),
    "adag, scaled": lambda: methods.adag(form="scaled"),
    "aeasgd, remembered": lambda: methods.aeasgd(order="remembered"),
    "lsgd, groups": lambda: methods.lsgd(groups=3, global_every=2),
}


SIZE, WORKERS, COMMITS = 12, 3, 6


# The property.


@jax.enable_x64(True)
def deviation_of_parts(method, messages):
    """Return the largest relative deviation between a method on a vector and on its parts.

    A version has ``messages`` messages.
    """
    rng, largest, everything = np.random.default_rng(0), 0.0, np.arange(SIZE)
    central = rng.normal(size=SIZE)
    places = [everything, *np.split(everything, 2)]  # halves have one program
    sides = [Side(method, place, central, [central] * WORKERS) for place in places]
    reads = [[side.central] * WORKERS for side in sides]
    for commit in range(COMMITS):
        worker = int(rng.integers(WORKERS)) if messages == 1 else commit % WORKERS
        staleness, place, step = rng.integers(4), commit % messages, commit // WORKERS
        visit = Visit(
            *np.array([staleness, worker, step, commit], np.int32),
            time=np.asarray(float(commit)),
            local_steps=np.int32(2),
            completes=np.bool_(place == messages - 1),
            place=np.int32(place),
            messages=np.int32(messages),
            workers=np.int32(WORKERS),
            loss=np.asarray(np.random.default_rng(commit).uniform()),
            key=visit_key(method_key(1), worker, step) if method.needs_key else (),
        )
        update, results = 0.1 * rng.normal(size=SIZE), []
        for side, read in zip(sides, reads, strict=True):
            start = side.start(worker, read[worker])
            message = side.commit(visit, update[side.entries], start, side.central)
            read[worker] = side.reply(visit)
            vectors = [leaf for leaf in jax.tree.leaves(message) if np.ndim(leaf) == 1]
            results.append([*vectors, side.central, read[worker], start])
        for vector, *parts in zip(*results, strict=True):
            joined = np.concatenate(parts)
            if not np.array_equal(joined, vector):  # both may be infinite
                largest = max(largest, deviation(joined, vector))
    return largest


@pytest.mark.parametrize(
    "name", [*NAMED, *(pytest.param(n, marks=pytest.mark.full) for n in VARIANTS)]
)
def test_the_declaration_of_each_method_is_true(name):
    """A method on parts of a vector is part of the method on the vector, if and only if declared.

    A version has several messages; for variants also one.
    """
    method, variants = {**NAMED, **VARIANTS}[name](), (3, 1) if name in VARIANTS else (3,)
    largest = max(deviation_of_parts(method, messages) for messages in variants)
    assert largest < SAME if method.coordinatewise else largest > 1e-3


@pytest.mark.parametrize("name", [name for name in attacks.ATTACKS if name != "label_flip"])
def test_the_declaration_of_each_attack_is_true(name):
    attack = attacks.ATTACKS[name](1, **({"z": 1.5} if name == "alie" else {}))
    attacked, _ = under_attack(methods.softsync(policy=None), None, attack, WORKERS)
    largest = deviation_of_parts(attacked, messages=3)
    assert largest < SAME if attack.coordinatewise else largest > 1e-3


# The order of parts.


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cluster=sharded(), commits=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_a_job_comes_after_its_reads_and_before_its_parts(cluster, commits, seed):
    """A shard's trace has its parts, and slots hold each version to its last reader."""
    trace = simulate(cluster, commits, seed).accepted
    jobs = find_jobs(trace)
    first = jobs.table["first"]
    assert (jobs.depends_on[first] <= first).all()
    assert (np.diff(jobs.parts_at_end) >= 0).all() and len(jobs.parts_at_end) == commits
    for shard in range(cluster.servers):
        parts = jobs.parts[jobs.parts["shard"] == shard]
        of_shard, job, used_at = trace_of_shard(trace, jobs, shard)
        assert (
            sorted(job) == list(range(len(first))) and (used_at[len(parts) :] <= len(parts)).all()
        )
        for name in ("worker", "job", "read_version", "staleness", "push_version", "version"):
            assert of_shard.frame[name].tolist()[: len(parts)] == parts[name].tolist(), name
        waves, held = find_waves(of_shard, used_at=used_at), {}
        writes = separate_reads(waves.read, waves.slot)
        for position in range(len(parts) + 1 if waves.reads == "separate" else 0):
            held |= {s: p for p, s in zip(*writes, strict=True) if p == position}
            for row in np.flatnonzero(used_at == position):
                assert held.get(waves.slot[row], 0) == waves.read[row]
