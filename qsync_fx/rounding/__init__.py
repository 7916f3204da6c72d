"""Where stochastic rounding draws from: `stream`, which `seeding` moves with torch's seed; `layout` tells the roundings of a step apart."""
