"""What the heads of attention have inside where they are not Llama's."""
