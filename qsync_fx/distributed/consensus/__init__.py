"""That ranks agree before they train, and see how the others fare, apart from the collectives in which a rank may be stuck."""
