"""Gradients between ranks: links of a given rate on one machine, codecs, all-reduces."""
