"""Predicted times of `ladder.ops`: products that exchange rows, by each of their implementations.

`run` executes the schedules of all ranks, the same ones that `ladder.ops` gives to CUDA streams.
`cost` says what their steps take on a machine, and `lower` builds both for a call. `predict` gives
a call's time, ECT and E; `scores` compares these with records of `ladder bench ops`.
"""
