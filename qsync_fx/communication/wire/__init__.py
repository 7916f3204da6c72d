"""Bytes between ranks: every pair at once, what stands before them, who waits for them, and what ranks tell each other at the end."""
