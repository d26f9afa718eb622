"""Datasets in the RLDS layout: TFRecord files of episodes, read and written without TensorFlow."""
