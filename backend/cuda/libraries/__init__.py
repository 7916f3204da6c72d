"""From configurations to libraries that can be called, each asked for once in a process (`kernels`).

`compiler` makes them, by `nvcc` within `budget`; `sass` looks at what came out (by `volta_code` for sm_70). `cache` keeps them with a
`manifest` under the `keys` of all that they depend on, and `library` loads them; `abi` is their C interface.
"""
