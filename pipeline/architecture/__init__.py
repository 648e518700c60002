"""The models' configurations, without torch: `config.py` declares their fields, `resnets.py` those of BiT, `variants.py` has those
that have a name. `objectives.py` has the names of the objectives.

A field of a model is declared once, in config.py, with what option.py has; the settings of a run, `--help`, saved models and exports derive from it.
Imports base/. Used by most rooms.
"""
