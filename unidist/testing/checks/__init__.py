"""The checks of the contract, one module per point or group."""
