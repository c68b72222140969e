"""A simulator that runs whole peers on virtual time, with faults. See docs/reference/simulator.md."""
