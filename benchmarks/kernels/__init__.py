"""Single kernels, beside the peers that compute the same, and how long it takes to build and to call them."""
