"""Gradient communication between ranks: rate-limited local links, codecs and all-reduces."""
