"""What ranks see of their devices and links while they train, and when that is a change that wants another plan."""
