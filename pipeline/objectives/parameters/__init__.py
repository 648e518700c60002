"""What a run does with the backbone's parameters: which are frozen, and how deep each is.

Imports model/ and base/. Used by estimate/ and objectives/.
"""
