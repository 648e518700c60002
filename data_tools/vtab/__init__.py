"""VTAB-1k from the files that the authors of its 16 data sets publish, without TensorFlow."""
