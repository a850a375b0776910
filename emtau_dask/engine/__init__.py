"""One chunk's task, passes over chunks, starts, K-means and the iteration loop."""
