"""Operators that give a tensor another format, and the seed that they round by."""
