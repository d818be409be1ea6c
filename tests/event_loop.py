"""The loop over events that a replay must agree with: one commit after the other, every version kept. Slow and obvious."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from asyncsim.methods import Method, Visit
from asyncsim.problems import Problem
from asyncsim.streams import stream_key


class Worker(NamedTuple):
    method: Any
    optimizer: Any
    problem: Any
    memory: Any


class EventLoop:
    """Replays a trace from its columns alone: who read which version, and in which order commits came."""

    def __init__(self, trace, method: Method, problem: Problem, seed: int = 0, dtype=jnp.float64):
        self.trace, self.method, self.problem = trace, method, problem
        self.dtype = dtype
        key = jax.random.wrap_key_data(stream_key(seed, "problem").view(np.uint32)[:2])
        init_key, self.key = jax.random.split(key)
        params = self.cast(problem.init(init_key))
        self.central, self.unravel = ravel_pytree(params)
        self.data = self.cast(problem.train)
        self.batches = problem.batch_indices(seed, trace.workers)
        self.server = method.init_server(self.central)
        first = Worker(
            method.init_worker(self.central),
            method.optimizer.init(params),
            problem.init_state() if problem.init_state else None,
            method.init_memory(self.central),
        )
        self.workers = dict.fromkeys(range(trace.workers), first)
        self.versions = {0: self.central}
        self.reads: dict[int, Any] = {}  # by commit: values forced by the test instead of the version's
        self.local = jax.jit(self._local)
        self.message = jax.jit(lambda *arguments: method.message(*arguments)[:2])
        self.apply = jax.jit(method.apply)

    def cast(self, tree):
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf, self.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype), tree
        )

    def run(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Replay commits ``begin`` to ``end - 1``; return their losses and how far the central variable moved."""
        losses, moved = [], []
        for row in self.trace.frame.iloc[begin:end].itertuples():
            visit = Visit(
                *(jnp.int32(value) for value in (row.staleness, row.worker, row.job, row.commit)),
                time=jnp.asarray(row.commit_time, self.dtype),
                local_steps=jnp.int32(row.local_steps),
            )
            worker = self.workers[row.worker]
            read = self.reads.get(row.commit, self.versions.get(row.read_version))
            start = self.method.resume(worker.method, read) if self.method.resume else read
            rows = None
            if self.batches is not None:
                rows = self.batches.rows([row.worker], [row.job], self.trace.window)[0]
            update, optimizer, state, loss = self.local(start, worker.optimizer, worker.problem, rows, visit)
            form = self.versions[row.form_version] if row.form_version < row.version - 1 else self.central
            message, method_state = self.message(worker.method, update, start, form, visit)
            applied = self.apply(self.server, self.central, message, worker.memory, visit)
            moved.append(jnp.linalg.norm(applied.central - self.central))
            losses.append(loss)
            self.central, self.server = applied.central, applied.server
            self.workers[row.worker] = Worker(method_state, optimizer, state, applied.memory)
            self.versions[row.version] = self.central
        return {"loss": np.array(losses), "update_norm": np.array(moved)}

    def _local(self, start, optimizer_state, problem_state, rows, visit):
        params, update, losses = self.unravel(start), jnp.zeros_like(start), []
        optimizer = optax.with_extra_args_support(self.method.optimizer)
        for step in range(self.trace.window):
            key = jax.random.fold_in(jax.random.fold_in(self.key, visit.worker), visit.worker_step)
            if self.trace.window > 1:
                key = jax.random.fold_in(key, step)
            batch = None if rows is None else jax.tree.map(lambda array, step=step: array[rows[step]], self.data)

            def loss(params, batch=batch, key=key):
                if self.problem.init_state is None:
                    return self.problem.loss(params, batch, key), problem_state
                return self.problem.loss(params, problem_state, batch, key)

            (value, problem_state), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            steps, optimizer_state = optimizer.update(gradients, optimizer_state, params, visit=visit)
            params = optax.apply_updates(params, steps)
            update = update + ravel_pytree(steps)[0]
            losses.append(value)
        return update, optimizer_state, problem_state, jnp.mean(jnp.stack(losses))
