"""What the study ``throughput`` compares the package with, and how it measures."""
