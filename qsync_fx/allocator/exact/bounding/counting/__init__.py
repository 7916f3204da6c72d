"""From how many buffers gradients are computed, at least and at most, under any plan: a compiler writes down what comes from too many."""
