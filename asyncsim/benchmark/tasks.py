"""The clusters, methods and problems of the throughput study."""

from pathlib import Path

import numpy as np

from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Constant, Gamma
from asyncsim.methods import METHODS, Method
from asyncsim.problems import Problem, digits, mnist, quadratic
from asyncsim.problems.mnist import mnist_from_arrays
from asyncsim.streams import Streams
from asyncsim.study.cell import meet

#: Random images in place of MNIST's, in its numbers.
TRAIN_IMAGES, TEST_IMAGES = 60_000, 10_000


def cluster(workers: int, service: float) -> Cluster:
    """Return the study's cluster: gamma compute times of 1 s, a server that is busy so many seconds a visit."""
    return Cluster(workers=workers, compute=Gamma(mean=1.0, cv=0.2), service=Constant(service))


def cluster_for(method: Method, workers: int) -> Cluster:
    """Return the cluster of a replay of a method: that of an instantaneous server, with the timing it needs."""
    return meet(cluster(workers, service=0.0), method.timing)


def make_method(name: str, most_workers: int) -> Method:
    """Return a method with a rate at which the quadratic does not diverge with so many workers."""
    return METHODS[name](learning_rate=0.5 / max(100, most_workers))


def make_problem(task: str, data_dir: Path | None = None) -> Problem:
    """Return a task's problem; MNIST's images are random ones unless a folder has the real ones."""
    if task == "quadratic":
        return quadratic(curvature=np.geomspace(0.01, 1, 16), noise=0.1)
    if task == "digits":
        return digits()
    if data_dir is not None:
        return mnist(data_dir=data_dir, network=task)
    return mnist_from_arrays(_random_images(0, TRAIN_IMAGES), _random_images(1, TEST_IMAGES), network=task)


def _random_images(part: int, examples: int) -> dict[str, np.ndarray]:
    generator = Streams(0, "random images").generator(part)
    image = generator.standard_normal((examples, 28, 28), np.float32)
    return {"image": image, "label": generator.integers(0, 10, examples, np.int32)}
