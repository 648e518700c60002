"""Parts of objectives, for any of them to use: heads, masks, published teachers, and a BatchNorm whose statistics are of all ranks.

Imports what objectives/ may. Used by objectives/.
"""
