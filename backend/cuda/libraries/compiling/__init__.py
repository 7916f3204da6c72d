"""Compiles what the cache lacks: `jobs`, processes of `nvcc` side by side within a `budget` of memory, and the `progress` that is told."""
