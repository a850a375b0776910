"""From what users have to rows of chunks in memory."""
