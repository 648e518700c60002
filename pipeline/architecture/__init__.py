"""The models' configurations, without torch: `config.py` declares their fields, `resnets.py` those of BiT, `variants.py` has those
that have a name.

A field of a model is declared once, in config.py, with what option.py has; the settings of a run, `--help`, saved models and exports derive from it.
Imports base/. Used by estimate/, evaluate/, model/, objectives/, settings/ and experiment/.
"""
