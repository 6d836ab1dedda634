"""unidist on TensorFlow: one device, MirroredStrategy and Horovod; Keras 3 models, `tf.Module` and tf.data."""
