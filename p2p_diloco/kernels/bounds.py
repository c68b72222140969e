"""Bounds on the magnitudes in the outer step. Within them every step is finite and equal on every processor.

Every element of an update is 0, or from 2^-64 to 2^64 in magnitude; codecs write and accept nothing else. Every element
of φ and m is 0 or at least 2^-64: the outer step turns smaller values into positive zero. Two claims follow, for any
number of updates in any order.

**The step stays finite.** Let |m| ≤ 2^89 and |φ| ≤ 2^119, as at the founding, with 0 ≤ μ ≤ 1 and η ≤ 16 in float32.
Rounding is monotonic, and 2^89 and 2^119 are float32 numbers, whose next larger neighbours are 2^66 and 2^96 away.

* |μ m + g| ≤ 2^89 + 2^64, which is less than half-way to 2^89's neighbour, so it is rounded to at most 2^89.
* Likewise |g + μ m| is at most 2^89, so |η (g + μ m)| is at most 2^93, which is less than half-way to 2^119's
  neighbour. So |φ − η (g + μ m)| is rounded to at most 2^119.

**A processor that flushes subnormal numbers, those below 2^-126, gets the same bytes.** With η and μ of at least 2^-24
(or μ = 0), μ m and μ m' are 0 or at least 2^-88, and what is added to them is a multiple of 2^-87; so sums are
multiples of 2^-111, and neither is subnormal. η (g + μ m') may be subnormal, and may then become 0 or not: it is below
2^-125, which changes no φ of 2^-64 or more, and a φ of 0 stays 0, because the result is too small. Codecs multiply
scales of at least 2^-64 by integers.
"""

from __future__ import annotations

SMALLEST = 2.0**-64
"""Smallest nonzero magnitude in φ, m and an update; anything smaller is stored as 0."""
LARGEST = 2.0**64
"""Largest magnitude of an element of an update."""
LARGEST_MOMENTUM = 2.0**89
LARGEST_ANCHOR = 2.0**119
SMALLEST_RATE, LARGEST_RATE = 2.0**-24, 16.0
"""Range of the outer learning rate η; the momentum μ is 0 or at least SMALLEST_RATE."""
