"""One simulator on the true shell: real nodes, links, clocks and storage on virtual time; only the edges are faked."""
