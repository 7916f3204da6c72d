"""One product of a layer: by a kernel of ours (`by_kernel` decides, `collect` asks beforehand), or by torch's unit for integers."""
