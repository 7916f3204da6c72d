"""What is measured while a model runs on the device at hand: times of lines, whose they are, bytes, and what stands beside a step."""
