"""From a pre-trained model to a new task."""
