"""Tests that need a GPU: `make test-gpu`.

A package, so that its files may be called as those beside it are.
"""
