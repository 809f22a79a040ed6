"""Seeds of generators, from a seed that the user gives."""

import operator


def spread(seed: int) -> int:
    """The start of a run of seeds, far from that of the next seed.

    torch's generator on a CPU reads 32 bits of its seed. The bits above those change them; the
    factor is odd, so that no two seeds with equal lower bits meet.
    """
    seed = operator.index(seed)  # Python's own: those of NumPy and torch overflow
    return seed * 1_000_003 ^ (seed >> 32) * 2_654_435_769
