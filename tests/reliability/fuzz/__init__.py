"""Inputs that are nearly what they should be, by the thousand: refused, or read as anyone else reads them."""
