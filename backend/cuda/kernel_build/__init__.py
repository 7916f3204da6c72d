"""Compilation, caching and loading of kernel libraries.

`kernel_registry` returns the library of a translation unit, once per process; start reading there.
`compiler` looks a unit up in the cache (`kernel_cache`), or compiles it by parallel processes of
nvcc and verifies the code. `library` defines the C interface and the manifest of a library, and
loads it.
"""
