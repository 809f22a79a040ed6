"""Limits of kernels that other code needs, too, such as predictions, which run without torch."""

MAX_ROWS = 64  # of a product of `ladder.kernels.decode`, and so of a decode step
CHUNK = 1024  # elements of a row per program of a landing, unless it makes pieces
MAX_SIZE = 16384  # elements of a row that a norm or a message holds
MAX_SUMS, MAX_OWNS = 2, 2  # of a landing
MAX_ADDENDS = 8  # of `ladder.kernels.norm`
PIECE = 2**26  # elements of a weight in 8 bits that are converted at once: enough to fill a GPU
# Attention of a decode step with few sequences times KV heads, over few blocks of 64 keys, has
# about so many programs beside other kernels.
FEW_HEADS, FEW_BLOCKS, FEW_PROGRAMS = 8, 32, 64
UNIT = 16  # bytes: elements and scales of messages in 8 bits begin at multiples


def message_bytes(size: int) -> int:
    """The bytes of a message in 8 bits (`ladder.kernels.messages`) for a row of `size` elements."""
    return -(-size // UNIT) * UNIT + UNIT
