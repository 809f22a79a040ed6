"""Communication between the GPUs of one host, below reducers and fused kernels.

access: whether GPUs can access each other's memory. symmetric: memory that all ranks can write.
driver, barriers: barriers of the ranks' CUDA streams. transports: exchange of rows of activations
by collectives or copy engines. push, two_shot: all-reduces. primitives: Triton functions for
kernels that access peers.
"""
