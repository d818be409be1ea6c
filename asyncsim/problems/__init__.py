"""Problems: what the workers learn, one task a file."""

from collections.abc import Callable

from asyncsim.problems.characters import characters
from asyncsim.problems.cifar10 import cifar10
from asyncsim.problems.convex import least_squares, logistic
from asyncsim.problems.custom import custom
from asyncsim.problems.digits import digits
from asyncsim.problems.mnist import mnist
from asyncsim.problems.problem import Problem
from asyncsim.problems.quadratic import quadratic

#: What the command line offers, by name.
PROBLEMS: dict[str, Callable[..., Problem]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "characters": characters,
    "quadratic": quadratic,
    "least_squares": least_squares,
    "logistic": logistic,
}

__all__ = [
    "PROBLEMS",
    "Problem",
    "characters",
    "cifar10",
    "custom",
    "digits",
    "least_squares",
    "logistic",
    "mnist",
    "quadratic",
]
