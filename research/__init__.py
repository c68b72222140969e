"""Experiments on learning: many islands in one process, with the real outer maths, compared with other systems."""
