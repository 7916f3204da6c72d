"""Whole training steps on the CPU, and what they take in compiling and in memory."""
