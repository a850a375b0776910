"""What users touch: the estimator, run configs, the command line."""
