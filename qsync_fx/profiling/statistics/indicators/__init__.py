"""The ways to find a sensitivity; `methods` lists them."""
