"""What Keras 3 needs on either framework: names of weights, and fit, evaluate and predict over several processes."""
