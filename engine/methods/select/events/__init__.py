"""Events of a text: where they begin, by surprise and by K, and what stands for them."""
