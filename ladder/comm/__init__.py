"""Communication between the GPUs of one host, below reducers and fused kernels.

access: whether GPUs may read each other's memory. symmetric: memory that all ranks can write.
driver, barriers: ranks wait for each other on their CUDA streams. transports: rows of activations
travel by collectives or copy engines. push, two_shot: all-reduces. primitives: the Triton functions
that kernels for peers are made of.
"""
