"""Several data sets at once: exact shares of each, spread evenly, an order made of the order of each set, and one split
of all.

`run_data.py` opens the data of a run, whether one set or a mixture. May import base/, pipeline.data.loading,
pipeline.data.dataset, pipeline.data.storage and pipeline.settings. Used by estimate/, cluster/, experiment/, review/
and train/.
"""
