"""The types of matrices in 8 bits by name, without torch; their values: ladder.models.storage."""

BLOCK = 128  # columns that share a scale in `fp8-block`
SCALE_BYTES = {"fp8": 4, "fp8-block": 1, "int8": 4}  # of one scale, as it is stored
EIGHT_BITS = tuple(SCALE_BYTES)
