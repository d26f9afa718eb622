"""Environments: the contract (`base`), the built-in tabletop world, and simulators behind the same contract."""
