"""Layer split, the neutral part: which device does what when, and what that costs."""
