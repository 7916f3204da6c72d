"""What sending gradients, and coding them, takes of ranks that train together: measured between the ranks that are up."""
