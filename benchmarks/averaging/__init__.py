"""Benchmark of a whole exchange between real processes, in turn with hivemind and gloo in one run."""
