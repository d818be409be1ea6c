"""Problems: the learning tasks of the workers, one task a file.

Most have ``batch_size``, the examples of a minibatch, and ``split``, the examples that each worker
draws from: None for all, ``"even"`` for disjoint parts, or with ten classes a number, the
concentration of the workers' class mixtures: 0.1 gives each worker few classes, 100 about equal
ones; see `Problem`.
"""

import functools
from collections.abc import Callable

from asyncsim.problems.arithmetic import arithmetic
from asyncsim.problems.characters import characters
from asyncsim.problems.cifar10 import cifar10
from asyncsim.problems.convex import least_squares, logistic
from asyncsim.problems.custom import custom
from asyncsim.problems.digits import digits
from asyncsim.problems.matrix_completion import matrix_completion
from asyncsim.problems.mnist import mnist
from asyncsim.problems.policy import PolicyProblem
from asyncsim.problems.problem import Problem
from asyncsim.problems.quadratic import quadratic
from asyncsim.problems.token_bandit import token_bandit
from asyncsim.problems.wells import wells

#: The one table of problems: the command line and its help follow from it.
PROBLEMS: dict[str, Callable[..., Problem]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "characters": characters,
    "quadratic": functools.partial(quadratic, curvature=(1.0, 0.3, 0.1, 0.03), noise=0.1),
    "least_squares": least_squares,
    "logistic": logistic,
    "wells": wells,
    "matrix_completion": matrix_completion,
}

#: The problems of `policy_gradient`, on clusters with rollouts.
POLICY_PROBLEMS: dict[str, Callable[..., PolicyProblem]] = {
    "token_bandit": token_bandit,
    "arithmetic": arithmetic,
}

__all__ = [
    "POLICY_PROBLEMS",
    "PROBLEMS",
    "PolicyProblem",
    "Problem",
    "arithmetic",
    "characters",
    "cifar10",
    "custom",
    "digits",
    "least_squares",
    "logistic",
    "matrix_completion",
    "mnist",
    "quadratic",
    "token_bandit",
    "wells",
]
