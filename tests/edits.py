"""Traces with other contents, by way of their record."""

from dataclasses import replace

import numpy as np
import pandas as pd

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


def log_of(trace: Trace) -> pd.DataFrame:
    """Return the log of a trace of rollouts: its samples, and the end of the update of each."""
    ends, log = trace.frame["commit_time"].to_numpy(), trace.samples.assign(train_time=np.nan)
    is_trained = log["outcome"] == "trained"
    log.loc[is_trained, "train_time"] = ends[log["version"][is_trained]]
    return log.drop(columns=["sample", "length"])
