"""Shared helpers of the tests: rank scripts, models, allocation problems and emulators."""
