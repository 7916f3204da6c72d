"""What the predictor foresees, beside what is measured: steps, memory, the loss of precision."""
