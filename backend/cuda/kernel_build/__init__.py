"""From configurations to libraries that can be called, each asked for once in a process (`kernels`).

`compiler` has them made where the cache has none, by `compiling`; `sass` looks at what came out (by `volta_code` for sm_70). `cache` keeps
them with a `manifest` under the `keys` of all that they depend on, and `library` loads them; `abi` is their C interface.

Compiles what the cache lacks: `jobs`, processes of `nvcc` side by side within a `budget` of memory, and the `progress` that is told.
"""
