"""What the figures of all studies and papers share: one `look`, `curves` of runs, and command lines."""
