"""The parameter server as a queue: workers that think, one server that serves them in order."""

from typing import NamedTuple

import numpy as np

from asyncsim.errors import InputError, require_count, require_nonnegative, require_positive


class Repairman(NamedTuple):
    """The stationary state of a closed queue with one server.

    Attributes
    ----------
    throughput : float
        Visits per second.
    in_system : float
        Mean number of visits waiting or in service.
    response : float
        Mean time from arrival to the end of service, seconds.
    utilisation : float
        Fraction of time that the server is busy.
    """

    throughput: float
    in_system: float
    response: float
    utilisation: float


def repairman(workers: int, think: float, service: float) -> Repairman:
    """Return the stationary state of the machine-repairman queue, by exact mean-value analysis.

    A visit of the ``k``-th worker finds the queue that ``k - 1`` workers would leave::

        response = service * (1 + in_system)
        throughput = k / (think + response)
        in_system = throughput * response

    Assumes exponential service, first come first served; the law of the think time does not matter.

    Parameters
    ----------
    workers : int
    think : float
        Mean time from one visit's end to the next arrival, seconds: computation and network.
    service : float
        Mean time that the server is busy per visit, seconds.

    References
    ----------
    Reiser and Lavenberg 1980, J. ACM 27, 313. With exponential think times this is M/M/1//N.
    """
    workers, think, service = _checked(workers, think, service)
    in_system = throughput = response = 0.0
    for k in range(1, workers + 1):
        response = service * (1 + in_system)
        throughput = k / (think + response)
        in_system = throughput * response
    return Repairman(throughput, in_system, response, throughput * service)


def repairman_probabilities(workers: int, think: float, service: float) -> np.ndarray:
    """Return the probabilities of 0, 1, ..., ``workers`` visits in the system, shape ``[workers + 1]``.

    ``P_k`` is proportional to ``N! / (N - k)! * (service / think)**k``. Assumptions as for ``repairman``.
    """
    workers, think, service = _checked(workers, think, service)
    if think == 0 or service == 0:
        return np.eye(workers + 1)[workers if think == 0 else 0]
    # Logarithms: the weights themselves overflow from 170 workers on.
    ratios = np.log(workers - np.arange(workers)) + np.log(service) - np.log(think)
    log_weights = np.concatenate([[0.0], np.cumsum(ratios)])
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def saturation_bound(workers: int, think: float, service: float) -> float:
    """Return the largest possible throughput, visits per second: ``min(N / (think + service), 1 / service)``.

    Holds for any laws with these means; constant think and service times reach it. (Asymptotic bounds
    of operational analysis: Denning and Buzen 1978, ACM Comput. Surv. 10, 225.)
    """
    workers, think, service = _checked(workers, think, service)
    alone = workers / (think + service)
    return min(alone, 1 / service) if service > 0 else alone


def knee(think: float, service: float) -> float:
    """Return the number of workers at which the server saturates: ``1 + think / service``.

    Also the largest possible speed-up over one worker. A worker that visits twice per window counts
    the sum of its two services.
    """
    return 1 + require_nonnegative("think", think, "seconds") / require_positive("service", service, "seconds")


def _checked(workers: int, think: float, service: float) -> tuple[int, float, float]:
    workers = require_count("workers", workers)
    think = require_nonnegative("think", think, "seconds")
    service = require_nonnegative("service", service, "seconds")
    if think + service == 0:
        raise InputError("think = service = 0: one of them must be above zero (seconds)")
    return workers, think, service
