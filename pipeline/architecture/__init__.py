"""The models' configurations, without torch: `config.py` declares their fields, `variants.py` has those
that have a name. `objectives.py` has the names of the objectives.

A field of a model is declared in config.py; what a run may set of it is a setting of the same
name. Imports base/. Used by most rooms.
"""
