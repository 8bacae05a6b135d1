"""One pass of tokens through the layers: prefill, decode, compiled and captured forms."""
