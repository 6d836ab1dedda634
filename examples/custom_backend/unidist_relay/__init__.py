"""A backend of unidist that relays gradients through the control plane."""
