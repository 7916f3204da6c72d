"""How good plans are that the allocator finds, and how fast it finds them."""
