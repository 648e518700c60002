"""What a run does with the backbone's parameters: which are frozen, how deep each is, and how Muon updates matrices.

Imports model/ and base/. Used by estimate/, objectives/ and train/.
"""
