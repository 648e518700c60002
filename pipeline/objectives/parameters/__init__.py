"""What a run does with parameters: their groups, optimizers (Muon too) and rates; which are frozen, how deep each is,
and LoRA.

Imports what objectives/ may. Used by data_tools/, estimate/, evaluate/, objectives/, train/ and experiment/.
"""
