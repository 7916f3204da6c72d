"""How long products, convolutions, copies and all-reduces take on a device that is not at hand, from its constants."""
