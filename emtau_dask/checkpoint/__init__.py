"""The states of a fit, written to and read from a store."""
