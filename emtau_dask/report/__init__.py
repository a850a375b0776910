"""The report of a fit: one page of HTML that needs no other file."""
