"""AQGB (X. Liu et al., 2022): as many bits as the link takes away while gradients come."""
