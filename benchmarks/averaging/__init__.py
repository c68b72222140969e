"""A whole exchange of real processes, beside what others wrote for it, in turn in one run."""
