"""How good a model is: accuracy, few-shot probes, per-class reports."""
