"""Constants that are fitted to times that others have published, and how near they come to those that were left out."""
