"""Parts of objectives, for any of them to use: heads, masks, and a BatchNorm whose statistics are of all ranks.

Imports data/loading/ and base/. Used by objectives/.
"""
