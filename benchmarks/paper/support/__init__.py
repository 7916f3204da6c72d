"""What experiments share: data, networks, pairs of ranks, what is kept between runs, pictures."""
