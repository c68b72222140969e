"""The maths of the outer optimiser: fragments, spans, pseudo-gradients, outer steps and merges; pure functions."""
