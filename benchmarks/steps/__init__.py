"""Full training steps on the CPU: step time, compile time and memory."""
