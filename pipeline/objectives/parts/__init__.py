"""Parts of objectives, for any of them to use: sums and gathers over all ranks, a BatchNorm with their statistics,
small views, published teachers.

Imports what objectives/ may. Used by estimate/ and objectives/.
"""
