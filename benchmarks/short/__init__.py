"""Short forms of the benchmarks: the same checks and bars on fewer instances, as claims.

Each module makes the entries of one benchmark (:mod:`benchmarks.claims`) from the rows that the
full form makes too, and says what of it is left out.
"""
