"""Run configs."""
