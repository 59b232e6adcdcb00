"""The passes of a round as CUDA graphs: the draft step as one, the verify pass in pieces cut at the experts calls."""
