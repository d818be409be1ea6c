"""The same loop and the same gradients as one would write them in PyTorch."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F

from asyncsim.benchmark import baselines
from asyncsim.clusters.cluster import Cluster
from asyncsim.methods import Method
from asyncsim.problems import Problem

#: A network's parameters: bias and weight of each layer in turn, or the one vector of the quadratic.
Tensors = list[torch.Tensor]


class TorchModel:
    """A problem's data, minibatches, initial parameters and loss in PyTorch.

    Parameters
    ----------
    problem : Problem
        The quadratic, digits, or either network of MNIST.
    """

    def __init__(self, problem: Problem, seed: int = 0):
        # Where JAX computes, if this build of PyTorch can.
        on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self._loss = _loss(problem)
        self._minibatches = baselines.Minibatches(problem, seed)
        leaves = jax.tree.leaves(problem.init(jax.random.key(seed)))
        self.start = [to_torch(np.asarray(leaf, np.float32)).to(self.device) for leaf in leaves]
        self._data = {
            # Its cross-entropy takes labels of 64 bits only.
            name: torch.tensor(array, dtype=torch.int64 if name == "label" else torch.float32, device=self.device)
            for name, array in (problem.train or {}).items()
        }

    def copies(self) -> Tensors:
        """Return the initial parameters, in memory of their own, ready for autograd."""
        return [tensor.clone().requires_grad_() for tensor in self.start]

    def gradient(self, params: Tensors, workers: int, worker: int, job: int) -> tuple[torch.Tensor, Any]:
        """Return the loss and the gradients of a worker's job, of so many workers."""
        batches = self._minibatches.of(workers)
        batch: dict[str, torch.Tensor] = {}
        if batches is not None:
            rows = torch.from_numpy(batches.rows([worker], [job])[0, 0]).to(self.device)
            batch = {name: array[rows] for name, array in self._data.items()}
        loss = self._loss(params, batch)
        return loss.detach(), torch.autograd.grad(loss, params)

    def finish(self, losses: list[torch.Tensor]) -> np.ndarray:
        """Wait for the device; return the losses, shape ``[commits]``."""
        return torch.stack(losses).cpu().numpy()


class TorchLoop:
    """A heap of events, autograd, and updates in place on separate tensors per worker: DOWNPOUR or GEM.

    Attributes
    ----------
    setup_seconds : float
        Of the last run: making the workers' tensors, each at its first visit.
    """

    def __init__(self, method: Method, problem: Problem, seed: int = 0):
        self._model, self._seed = TorchModel(problem, seed), seed
        self._update, self._states = _METHODS[method.name]
        self._hyperparameters = dict(method.hyperparameters)
        self.setup_seconds = 0.0

    def run(self, cluster: Cluster, commits: int) -> tuple[Tensors, np.ndarray]:
        """Run some commits from the start; return the central variable, in PyTorch's shapes, and the losses."""
        n = cluster.workers
        events = baselines.Events(cluster, commits, self._seed)
        central = [tensor.clone() for tensor in self._model.start]
        workers: dict[int, tuple[Tensors, Any]] = {}
        jobs, losses = [0] * n, []
        self.setup_seconds = 0.0
        for _ in range(commits):
            i = events.next()
            if i not in workers:
                workers[i] = self._make_worker()
            params, state = workers[i]
            loss, gradients = self._model.gradient(params, n, i, jobs[i])
            with torch.no_grad():
                self._update(central, gradients, state, **self._hyperparameters)
                for own, new in zip(params, central, strict=True):
                    own.copy_(new)
            losses.append(loss)
            jobs[i] += 1
            events.start(jobs[i])
        return central, self._model.finish(losses)

    def _make_worker(self) -> tuple[Tensors, Any]:
        """Return a worker's parameters and state at version zero; the time it takes is no part of a long run's."""
        started = time.perf_counter()
        worker = self._model.copies(), self._states(self._model.start)
        self.setup_seconds += time.perf_counter() - started
        return worker


class TorchGradients:
    """The gradients and nothing else, at the parameters of one worker after the other."""

    def __init__(self, problem: Problem, workers: int, seed: int = 0):
        self._model = TorchModel(problem, seed)
        self._params = [self._model.copies() for _ in range(workers)]

    def run(self, count: int) -> np.ndarray:
        """Compute so many gradients; return their losses."""
        n = len(self._params)
        jobs = ((i % n, i // n) for i in range(count))
        return self._model.finish([self._model.gradient(self._params[i], n, i, job)[0] for i, job in jobs])


def thread_counts() -> list[int]:
    """Return the numbers of threads to try: one, and one for each processor."""
    return sorted({1, os.cpu_count() or 1})


def use_threads(count: int) -> None:
    """Let PyTorch compute with so many threads from now on."""
    torch.set_num_threads(count)


def to_torch(leaf: np.ndarray) -> torch.Tensor:
    """Return a JAX layer's weight or bias in PyTorch's order of axes: units first."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(leaf.ndim, range(leaf.ndim))
    return torch.tensor(leaf.transpose(axes)).contiguous()


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """Undo `to_torch`."""
    axes = {4: (2, 3, 1, 0), 2: (1, 0)}.get(tensor.ndim, range(tensor.ndim))
    return tensor.detach().cpu().numpy().transpose(axes)


def _downpour(central: Tensors, gradients: Tensors, state: Any, learning_rate: float) -> None:
    for x, gradient in zip(central, gradients, strict=True):
        x.sub_(gradient, alpha=learning_rate)


def _gem(
    central: Tensors,
    gradients: Tensors,
    state: Any,
    learning_rate: float,
    momentum: float,
    kappa: float,
    pi_max: float,
    variant: str,
) -> None:
    """Update as `asyncsim.methods.gem` does, in the program's variant."""
    for x, gradient, (m, pulled) in zip(central, gradients, state, strict=True):
        update = gradient.mul_(-learning_rate)
        m.mul_(momentum).add_(update)
        moved = (x - pulled).abs_()
        pulled.copy_(x)
        pi = m.abs().mul_(kappa).sub_(moved).div_((update + 1e-12).abs_()).clamp_(0, pi_max)
        x.addcmul_(pi, update)


def _gem_states(central: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros_like(x), x.clone()) for x in central]


_METHODS: dict[str, tuple[Callable[..., None], Callable[[Tensors], Any]]] = {
    "downpour": (_downpour, lambda central: None),
    "gem": (_gem, _gem_states),
}


def _loss(problem: Problem) -> Callable[[Tensors, dict[str, torch.Tensor]], torch.Tensor]:
    """Return the loss of a problem's minibatch."""
    config = problem.config
    if problem.name == "quadratic":
        curvature, noise = torch.tensor(config["curvature"]), config["noise"]
        return lambda params, batch: _quadratic(params[0], curvature.to(params[0]), noise)
    if config.get("network") == "cnn":
        return lambda params, batch: F.cross_entropy(_cnn(params, batch["image"], config["dropout"]), batch["label"])
    return lambda params, batch: F.cross_entropy(_mlp(params, batch["image"]), batch["label"])


def _quadratic(x: torch.Tensor, curvature: torch.Tensor, noise: float) -> torch.Tensor:
    energy = 0.5 * torch.sum(curvature * x * x)
    return energy + noise * torch.dot(torch.randn_like(x), x) if noise else energy


def _mlp(params: Tensors, images: torch.Tensor) -> torch.Tensor:
    activity = images.flatten(1)
    for layer in range(0, len(params) - 2, 2):
        activity = F.relu(F.linear(activity, params[layer + 1], params[layer]))
    return F.linear(activity, params[-1], params[-2])


def _cnn(params: Tensors, images: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return the scores of the GEM paper's network, in its own order of layers."""
    activity = F.relu(F.max_pool2d(F.conv2d(images[:, None], params[1], params[0]), 2))
    activity = F.dropout2d(F.conv2d(activity, params[3], params[2]), dropout)
    activity = F.relu(F.max_pool2d(activity, 2))
    return _mlp(params[4:], activity)
