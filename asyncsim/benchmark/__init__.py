"""Baselines of the study ``throughput``, and the timing of contenders in turns."""
