"""The usual loop as one would write it in PyTorch."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F

from asyncsim.benchmark.contenders import events, minibatches
from asyncsim.benchmark.turns import calibrate, timed
from asyncsim.clusters.cluster import Cluster
from asyncsim.methods import Method
from asyncsim.problems import Problem

#: A network's parameters: bias and weight of each layer in turn, or the one vector of the
#: quadratic.
Tensors = list[torch.Tensor]


class TorchLoop:
    """A heap of events, autograd, and updates in place on separate tensors per worker: DOWNPOUR or
    GEM.

    Computes on a GPU if JAX does and this build of PyTorch can. ``central`` and ``losses`` are the
    results of the last run.
    """

    def __init__(self, method: Method, problem: Problem, cluster: Cluster, seed: int = 0):
        on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        self._update, self._state = _METHODS[method.name]
        self._hyperparameters = dict(method.hyperparameters)
        self._cluster, self._seed, self._loss = cluster, seed, _loss(problem)
        self._rows = minibatches(problem, cluster.workers, seed)
        leaves = jax.tree.leaves(problem.init(jax.random.key(seed)))
        self.central: Tensors = [
            to_torch(np.asarray(leaf, np.float32)).to(device) for leaf in leaves
        ]
        self._start, self.losses = self.central, np.zeros(0)
        self._data = {
            # Its cross-entropy takes labels of 64 bits only.
            name: torch.tensor(
                array, dtype=torch.int64 if name == "label" else torch.float32, device=device
            )
            for name, array in (problem.train or {}).items()
        }

    def tune(self, seconds: float) -> int:
        """Use one thread or all processors, whichever is faster; return the commits that take
        ``seconds``.
        """
        amounts = {}
        for count in {1, os.cpu_count() or 1}:
            torch.set_num_threads(count)
            amounts[count] = calibrate(self.run, seconds)
        best = max(amounts, key=amounts.__getitem__)
        torch.set_num_threads(best)
        return amounts[best]

    def run(self, commits: int) -> float:
        """Run ``commits`` commits from the start; return the seconds.

        Creating the workers' state is excluded, as it is negligible in a long run.
        """
        active = {i for i, _ in events(self._cluster, commits, self._seed)}
        workers = {i: [tensor.clone().requires_grad_() for tensor in self._start] for i in active}
        return timed(self._run, commits, workers, {i: self._state(self._start) for i in active})

    def _run(self, commits: int, workers: dict[int, Tensors], states: dict[int, Any]) -> None:
        central, losses = [tensor.clone() for tensor in self._start], []
        for i, job in events(self._cluster, commits, self._seed):
            params = workers[i]
            rows = torch.from_numpy(self._rows([i], [job])[0]).to(central[0].device)
            loss = self._loss(params, {name: array[rows] for name, array in self._data.items()})
            gradients = torch.autograd.grad(loss, params)
            with torch.no_grad():
                self._update(central, gradients, states[i], **self._hyperparameters)
                for parameter, value in zip(params, central, strict=True):
                    parameter.copy_(value)
            losses.append(loss.detach())
        self.central, self.losses = (
            central,
            torch.stack(losses).cpu().numpy(),
        )  # which waits for the device


def to_torch(leaf: np.ndarray) -> torch.Tensor:
    """Return a JAX layer's weight or bias in PyTorch's order of axes: units first."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(leaf.ndim, range(leaf.ndim))
    return torch.tensor(leaf.transpose(axes)).contiguous()


def _downpour(central: Tensors, gradients: Any, state: Any, learning_rate: float) -> None:
    for x, gradient in zip(central, gradients, strict=True):
        x.sub_(gradient, alpha=learning_rate)


def _gem(central, gradients, state, learning_rate, momentum, kappa, pi_max, variant) -> None:
    """Update as `asyncsim.methods.gem` does, in the program's variant."""
    for x, gradient, (m, pulled) in zip(central, gradients, state, strict=True):
        update = gradient.mul_(-learning_rate)
        m.mul_(momentum).add_(update)
        moved = (x - pulled).abs_()
        pulled.copy_(x)
        pi = m.abs().mul_(kappa).sub_(moved).div_((update + 1e-12).abs_()).clamp_(0, pi_max)
        x.addcmul_(pi, update)


#: By method, its update and the initial state of each worker.
_METHODS: dict[str, tuple[Callable[..., None], Callable[[Tensors], Any]]] = {
    "downpour": (_downpour, lambda central: None),
    "gem": (_gem, lambda central: [(torch.zeros_like(x), x.clone()) for x in central]),
}


def _loss(problem: Problem) -> Callable[[Tensors, dict[str, torch.Tensor]], torch.Tensor]:
    """Return the loss of a problem's minibatch."""
    config = problem.config
    if problem.name == "quadratic":
        curvature, noise = torch.tensor(config["curvature"]), config["noise"]

        def quadratic(params: Tensors, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            (x,) = params
            energy = 0.5 * torch.sum(curvature.to(x) * x * x)
            return energy + noise * torch.dot(torch.randn_like(x), x) if noise else energy

        return quadratic
    network = _cnn(config["dropout"]) if config.get("network") == "cnn" else _mlp
    return lambda params, batch: F.cross_entropy(network(params, batch["image"]), batch["label"])


def _mlp(params: Tensors, images: torch.Tensor) -> torch.Tensor:
    activity = images.flatten(1)
    for layer in range(0, len(params) - 2, 2):
        activity = F.relu(F.linear(activity, params[layer + 1], params[layer]))
    return F.linear(activity, params[-1], params[-2])


def _cnn(dropout: float) -> Callable[[Tensors, torch.Tensor], torch.Tensor]:
    """Return the GEM paper's network, in its own order of layers."""

    def network(params: Tensors, images: torch.Tensor) -> torch.Tensor:
        activity = F.relu(F.max_pool2d(F.conv2d(images[:, None], params[1], params[0]), 2))
        activity = F.dropout2d(F.conv2d(activity, params[3], params[2]), dropout)
        return _mlp(params[4:], F.relu(F.max_pool2d(activity, 2)))

    return network
