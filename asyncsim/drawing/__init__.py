"""Shared parts of all figures: the style (`look`), `curves` of runs, plots of traces, command
lines.
"""
