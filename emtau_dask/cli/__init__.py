"""The command `emtau`."""
