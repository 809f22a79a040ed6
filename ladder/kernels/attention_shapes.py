"""How the attention of a decode step is cut into programs (`ladder.kernels.attention`)."""

from __future__ import annotations

from ladder.costs import MULTIPROCESSORS
from ladder.jit import triton

# The wanted number of programs: two for each SM. It is a constant, so that the order of sums does
# not depend on the device.
PROGRAMS = 2 * MULTIPROCESSORS
FULL = 96  # programs that fill the GPU without a split
MAX_SPLITS = 128
CHEAP_SPLITS = 32  # up to here the combination is not weighed against the reading
COMBINED = 128 * 128  # numbers combined at once: 128 registers of each thread of 4 warps


def shape(
    sequences_and_heads: int, length: int, dims: int, row_bytes: int
) -> tuple[int, int, int, bool]:
    """(keys per block, splits, warps, ahead): enough programs to fill the GPU, none idle.

    ahead: read the first block before the wait for the previous kernel, if there are few programs.
    Chosen by measurements on an H200 (benchmarks/results/README.md).
    """
    if sequences_and_heads >= FULL:
        return max(16, min(128, 32768 // row_bytes)), 1, 8, False
    # At most 16 KiB per block of keys with 4 warps: larger blocks spill registers.
    block = max(16, min(64, 16384 // row_bytes))
    wanted = min(splits(sequences_and_heads, triton.cdiv(length, block)), COMBINED // dims)
    return block, wanted, 4, sequences_and_heads * 16 <= PROGRAMS


def splits(sequences_and_heads: int, blocks: int) -> int:
    """How many programs share the `blocks` blocks of keys of one KV head: a power of two.

    One of them combines all their results, at the 50 to 100 GB/s of one SM. With 8 query heads of
    128, those of 128 splits are 512 KiB, at least 5 us; the keys and values of 8192 tokens on 2 KV
    heads are 8 MiB, 2 us at 4.2 TB/s. So beyond CHEAP_SPLITS
    - the programs are one per SM, not two: two blocks in flight in each, 64 KiB, make 8 MiB, where
      4.2 TB/s over a latency of 1 us needs 4;
    - a split has at least two blocks, which it reads at once.
    """
    wanted = -(-PROGRAMS // sequences_and_heads)
    if wanted > CHEAP_SPLITS:
        one_each = -(-PROGRAMS // 2 // sequences_and_heads)
        wanted = max(CHEAP_SPLITS, min(one_each, blocks // 2, MAX_SPLITS))
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(blocks))


def heads_at_once(group: int, splits: int, dims: int) -> int:
    """Query heads of which one program combines the splits at once, without spilled registers."""
    return max(1, min(triton.next_power_of_2(group), COMBINED // (splits * dims)))
