"""What unidist ships for testing backends: the NumPy truth and the checks that use it."""
