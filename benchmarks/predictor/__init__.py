"""Predictions compared with measurements: step time, peak memory and loss of precision."""
