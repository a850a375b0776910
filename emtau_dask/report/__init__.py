"""The report of a fit: one page of HTML that needs nothing beside itself."""
