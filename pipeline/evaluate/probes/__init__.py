"""Few-shot linear and nearest-neighbour accuracy of features, and their spread (RankMe).

Imports what evaluate/ may import. Used by evaluate/, explain/, train/, experiment/ and review/.
"""
