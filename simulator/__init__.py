"""A simulator that runs whole peers on virtual time, with faults. See simulator/README.md."""
