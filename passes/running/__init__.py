"""What the runner of passes hangs on itself: snapshots, timing, the text of graphs, and what becomes of one that a pass of ours broke."""
