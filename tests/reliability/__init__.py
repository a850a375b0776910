"""Fits in processes of their own that are killed, stopped and starved at chosen steps."""
