"""The 8-bit types of matrices by name, without torch. For their values: ladder.models.storage."""

BLOCK = 128  # columns that share a scale in `fp8-block`
SCALE_BYTES = {"fp8": 4, "fp8-block": 1, "int8": 4}  # of one scale, as it is stored
EIGHT_BITS = tuple(SCALE_BYTES)
