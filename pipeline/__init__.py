"""Pre-training, fine-tuning and evaluation of Vision Transformers."""
