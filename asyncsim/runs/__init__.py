"""Runs: what a replay brings back, and its files."""

from asyncsim.runs.run import Run

__all__ = ["Run"]
