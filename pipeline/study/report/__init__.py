"""The report of a study: `answers.py` says what follows from its results, `sentences.py`, `figures.py` and `report.py` show it.

`published.py` has the results of papers to compare with. Imports laws/ and rooms below study/. Used by study/.
"""
