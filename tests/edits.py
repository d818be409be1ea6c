"""Traces with other contents, by way of their record."""

from dataclasses import replace

import numpy as np

from asyncsim import Trace
from asyncsim.traces.bookkeeping import messages_to_server
from asyncsim.traces.columns import table_of


def with_columns(trace: Trace, **columns) -> Trace:
    """Return a trace with other columns of its steps."""
    steps = trace.steps.assign(**columns)
    return replace(trace, steps=steps.astype({"outcome": trace.steps["outcome"].dtype}))


def with_versions(trace: Trace, versions) -> Trace:
    """Return a trace of a server with another number for each version, ``[versions + 1]``."""
    versions = np.asarray(versions)
    steps, reads = (
        table.assign(version=versions[table["version"]]) for table in (trace.steps, trace.reads)
    )
    messages = messages_to_server(steps, dict(trace.present), trace.absences)
    return replace(trace, steps=steps, reads=reads, messages=messages)


def without_cluster(trace: Trace) -> Trace:
    """Return a simulated trace as a recorded one looks, which knows of no absences."""
    causes = ("failed_by", "incarnation")
    steps = {name: values for name, values in trace.steps.items() if name not in causes}
    return replace(
        trace,
        cluster=None,
        steps=table_of("steps", steps),
        absences=trace.absences.head(0),
    )
