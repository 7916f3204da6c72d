"""Tests that need a GPU: `make test-gpu`.

A package, so that its file names may equal names in other test folders.
"""
