"""Building blocks of the decoder: attention projections and the gated MLP."""
