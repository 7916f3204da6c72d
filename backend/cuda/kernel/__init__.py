"""A kernel as data: a frozen `KernelConfig`, and what each architecture has."""
