"""The inner loops of a recurrent layer: the causal convolution and the gated delta rule."""
