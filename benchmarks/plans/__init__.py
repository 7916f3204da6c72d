"""Plan quality and solve time of the allocators."""
