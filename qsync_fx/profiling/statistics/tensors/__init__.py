"""What methods look at: runs that can be repeated and changed, the tensors that operators round, and the gates that noise flips."""
