"""How long gradients take in each codec: measured, and foreseen."""
