"""Measurement of collectives and codecs, on all ranks: start with `link_measurement.linked`."""
