"""Benchmark of training while exchanging: the cost of an exchange in inner steps, compared with systems that wait."""
