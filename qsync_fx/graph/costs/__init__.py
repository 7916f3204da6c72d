"""What operators and casts cost: what flows where, what is kept, and the DAG that all of it is given out as."""
