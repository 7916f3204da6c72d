"""Constants fitted to published times, and their prediction error on held-out times."""
