"""What a run does with the backbone's parameters: which are frozen, how deep each is, LoRA, and how Muon updates matrices.

Imports checkpoint/ (names), model/ and base/. Used by estimate/, objectives/ and train/.
"""
