"""Methods that rebuild the K that they read from few numbers a token, and bring V alone."""
