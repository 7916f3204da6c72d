"""What benchmarks of all folders share: arguments, timing, rows, models. Nothing here is run by itself."""
