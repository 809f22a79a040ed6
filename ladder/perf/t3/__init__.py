"""T3 simulated: a product and the reduce-scatter behind it, overlapped by tracking and triggering.

Source: T3 (Pati et al., ASPLOS 2024). `system` has the paper's hardware, models and sublayers, and
the times of one operation alone; `simulate` runs the fused operations event by event; `figures`
holds the results of both against the paper's. Sections, tables and figures named here are the
paper's.
"""
