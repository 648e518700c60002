"""Power laws: `fit.py` fits one to runs and predicts larger ones, `fit_optimal.py` finds the best of several at a budget, `fit_numbers.py` is the search.

Knows numbers only, no study. Imports base/ and the quantiles of evaluate/intervals.py. Used by study/.
"""
