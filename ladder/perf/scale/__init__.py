"""Several nodes, simulated: a DLRM on 128, Ladder Residual's tables, and training on up to 1,024
GPUs.

`networks` has collectives in closed form. `dlrm` is Figure 15 of `Optimizing Distributed ML
Communication with Fused Computation-Collective Operations` (Punniyamurthy et al.); `published`,
`tables` and `software` are of Ladder Residual (arXiv 2501.06589); `curves` are our own predictions,
which nobody has measured.
"""
